"""Presets are the rows of the published table they name, and say so when a run is not what they are for."""

from __future__ import annotations

import re

import pytest

from lctrain.config.compose import compose_config, conf_dir
from lctrain.config.image_checks import batch_notes
from lctrain.config.optim import LarsConfig, LarsForm
from lctrain.config.resolve import resolve
from lctrain.config.root import TrainConfig
from lctrain.config.schedule import PolynomialConfig
from lctrain.errors import ConfigError
from lctrain.optim.schedule import lr_factor, warmup_steps

IMAGES = 1_281_167  # of ImageNet's training part
# batch: (rate, trust, form, momentum, decay, warm-up epochs, power, end rate, decay steps or None for epochs)
MLPERF = {
    "rn50_lars_8k": (8192, 17.0, 0.001, LarsForm.paper, 0.9, 2e-4, 5, 2.0, 1e-4, 6095),
    "rn50_lars_16k": (16384, 25.0, 0.001, LarsForm.paper, 0.9, 2e-4, 5, 2.0, 1e-4, 5245),
    "rn50_lars_32k": (32768, 21.2, 0.001, LarsForm.paper, 0.94, 2.5e-5, 16, 2.0, 1e-4, 2267),
    "rn50_lars_64k": (65536, 24.699, 0.001, LarsForm.paper, 0.951807, 1e-4, 31, 2.0, 1e-4, 1133),
    "rn50_lars_82k": (81920, 13.0, 0.0025, LarsForm.fujitsu, 0.96, 5e-5, 36, 2.2, 0.0025 * 13.0, None),
}


def preset(name: str, *overrides: str) -> TrainConfig:
    """ResNet-50's recipe with a preset."""
    return compose_config(["recipe=resnet50_imagenet", f"preset={name}", "data.source=/images", *overrides])


def test_every_preset_is_in_the_table_and_names_its_source() -> None:
    files = sorted((conf_dir() / "preset").iterdir())
    assert [path.stem for path in files] == sorted(MLPERF)
    for path in files:
        assert re.search(r"^# Source: \S", path.read_text(), re.M), path


@pytest.mark.parametrize("name", sorted(MLPERF))
def test_a_preset_is_its_row_of_the_table(name: str) -> None:
    batch, lr, trust, form, momentum, decay, warmup, power, end, decay_steps = MLPERF[name]
    config = preset(name)
    optim, schedule, train = config.optim, config.schedule, config.train
    assert isinstance(optim, LarsConfig)
    assert isinstance(schedule, PolynomialConfig)
    assert config.preset == name
    assert (train.global_batch_size, train.max_grad_norm) == (batch, None)
    assert (optim.trust, optim.form, optim.eps, optim.momentum, optim.weight_decay) == (
        trust,
        form,
        None,
        momentum,
        decay,
    )
    assert optim.peak_lr(batch) == lr
    assert (schedule.warmup_epochs, schedule.power, schedule.end_lr) == (warmup, power, pytest.approx(end))
    assert config.classification.label_smoothing == 0.1
    assert (config.bn.momentum, config.bn.eps) == (0.1, 1e-5)
    per_epoch = IMAGES / batch
    if decay_steps is None:
        assert (train.max_steps, train.max_epochs) == (None, 90)
        assert (config.images.crop_area, config.images.augment_epochs) == ([0.05, 0.9], 85)
        return
    assert train.max_epochs is None
    assert train.max_steps is not None
    assert train.max_steps - warmup_steps(schedule, train.max_steps, steps_per_epoch=per_epoch) == decay_steps
    # MLPerf's polynomial: end + (peak - end) (1 - t / T)^2 in the middle of the decay.
    step = train.max_steps - decay_steps + 1000
    expected = end + (lr - end) * (1 - 1000 / decay_steps) ** 2
    rate = lr * lr_factor(schedule, step, train.max_steps, steps_per_epoch=per_epoch, peak=lr)
    assert rate == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", sorted(MLPERF))
def test_a_preset_runs_on_the_recipes_ranks_and_is_refused_on_others(name: str) -> None:
    config = preset(name)
    assert resolve(config).accumulation * 8 * 256 == config.train.global_batch_size
    config.launch.nproc_per_node = 3
    with pytest.raises(ConfigError, match=rf"\(preset={name}\) is not a multiple of .*256 x 3 data ranks = 768; set"):
        resolve(config)


def test_another_batch_than_the_numbers_are_for_is_warned_about() -> None:
    for name in MLPERF:
        tuned = [note for note in batch_notes(preset(name), 1, data_ranks=1) if "tuned" in note]
        assert bool(tuned) == (name == "rn50_lars_82k")
    (note,) = batch_notes(preset("rn50_lars_82k"), 1, data_ranks=1)
    assert "tuned for train.global_batch_size=86,016 and this run has 81,920" in note
    (note,) = batch_notes(preset("rn50_lars_8k", "train.global_batch_size=4096"), 1, data_ranks=1)
    assert "8,192 and this run has 4,096; its accuracy is not known" in note


def test_accumulation_in_front_of_batch_norm_is_warned_about() -> None:
    config = preset("rn50_lars_8k")
    (note,) = batch_notes(config, resolve(config).accumulation, data_ranks=2)
    assert note.startswith(
        "warning: BatchNorm normalises 256 images at a time, not the 1,024 a rank has in a step, and "
    )
    assert "updates its running statistics 4 times a step" in note
    synced = preset("rn50_lars_8k", "bn.statistics=sync")
    (note,) = batch_notes(synced, resolve(synced).accumulation, data_ranks=8)
    assert note.startswith(
        "warning: BatchNorm normalises 2,048 images at a time, not the 8,192 all ranks together have in a step"
    )
    lenet = compose_config(["recipe=lenet_fashion_mnist", "train.micro_batch_size=16"])
    assert batch_notes(lenet, resolve(lenet).accumulation, data_ranks=2) == []
