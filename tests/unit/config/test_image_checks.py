"""What an image job and a language job refuse across their groups, with the mend."""

from __future__ import annotations

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.image_checks import batch_notes
from lctrain.config.resolve import resolve
from lctrain.errors import ConfigError


def refusal(*overrides: str) -> str:
    """The message of words that do not make a job."""
    with pytest.raises(ConfigError) as caught:
        resolve(compose_config(list(overrides)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "train.micro_batch_size=1",
            ["train.micro_batch_size=1 gives BatchNorm one image at a time", "to at least 2, e.g. 128"],
        ),
        (
            "bn.statistics=ghost bn.ghost_size=48",
            ["bn.ghost_size=48 does not divide train.micro_batch_size=128", "a divisor of 128"],
        ),
        ("bn.ghost_size=32", ["bn.ghost_size=32 does not fit bn.statistics=local", "give both"]),
        ("bn.statistics=ghost", ["bn.ghost_size=None does not fit bn.statistics=ghost", "give both"]),
        ("bn.statistics=ghost bn.ghost_size=1", ["bn.ghost_size=1 must be at least 2"]),
        ("parallel=fsdp_sp", ["parallel=fsdp_sp splits sequences", "choose parallel=single, ddp, fsdp or hsdp"]),
        ("parallel=zero2", ["parallel=zero2 splits sequences or DeepSpeed's states", "choose parallel=single"]),
        ("memory=full", ["memory.recompute is for decoder layers and model=resnet has none", "use memory=none"]),
        ("memory.loss_chunk_mb=8", ["memory.loss_chunk_mb=8 has no effect on model=resnet", "leave it out"]),
        ("memory.tiled_mlp=8", ["memory.tiled_mlp is for decoder layers", "use memory=none"]),
        ("parallel=fsdp parallel.offload_params=true", ["parallel.offload_params=true", "set it to false"]),
        ("data.source=null", ["data.source is not set", "give a folder"]),
        (
            "parallel.static_graph=true train.micro_batch_size=64",
            ["parallel.static_graph=true does not work with 2 micro-steps", "set it to false"],
        ),
        (
            "bn.statistics=sync bn.sync=mean",
            ["bn.sync=mean has no effect with bn.statistics=sync", "leave it out, or give bn.sync=precise"],
        ),
        ("optim.lr=inf", ["optim.lr=inf must be a finite number"]),
        ("train.max_epochs=inf", ["train.max_epochs=inf must be a finite number"]),
        ("data.mean=[nan]", ["data.mean=[nan] must be a finite number"]),
        (
            "optim.lr=0.1 schedule.end_lr=0.3",
            ["schedule.end_lr=0.3 is more than the peak rate 0.1, from which cosine falls", "lower it, or raise"],
        ),
        ("classification.label_smoothing=1", ["classification.label_smoothing=1", "must be in [0, 1)"]),
        ("classification.ema_decay=1", ["classification.ema_decay=1", "or null for none"]),
        ("logging.mlflow.per_rank=true", ["logging.mlflow.per_rank=True", "give logging.mlflow.uri"]),
    ],
)
def test_image_jobs(overrides: str, said: list[str]) -> None:
    text = refusal("recipe=resnet8_fashion_mnist", *overrides.split())
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("bn.sync=mean", ["bn.sync=mean has no effect on model=causal_lm; leave bn.* out"]),
        ("bn.momentum=0.2", ["bn.momentum=0.2", "has no effect on model=causal_lm"]),
        ("classification.mixup=0.2", ["classification.mixup=0.2 has no effect", "leave classification.* out"]),
        ("logging.mlperf=true", ["logging.mlperf=true logs ResNet's MLPerf benchmark only"]),
        ("parallel=zero2 optim=lars", ["optim=lars does not work with parallel=zero2", "choose optim=adamw"]),
    ],
)
def test_language_jobs(overrides: str, said: list[str]) -> None:
    text = refusal("recipe=llama_tiny_32k", *overrides.split())
    assert all(part in text for part in said), text


def test_the_regimes_do_not_mix() -> None:
    images, language = (compose_config([f"recipe={name}"]) for name in ("resnet8_fashion_mnist", "llama_tiny_32k"))
    images.data, language.data = language.data, images.data
    with pytest.raises(
        ConfigError, match="data=text does not fit model=resnet, which reads images; choose data=images"
    ):
        resolve(images)
    with pytest.raises(
        ConfigError, match="data=images does not fit model=causal_lm, which reads text; choose data=text"
    ):
        resolve(language)
    # A recipe of the other regime is refused where its fields are composed.
    assert "choose those it was written for" in refusal("recipe=llama_tiny_32k", "data=images")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("data.image_size=8", ["data.image_size=8 does not fit model=lenet", "a multiple of 4 of at least 12"]),
        ("data.image_size=30", ["data.image_size=30 does not fit model=lenet"]),
        ("bn.sync=mean", ["bn.sync has no effect on model=lenet, which has no BatchNorm", "leave bn.* out"]),
    ],
)
def test_what_lenet_cannot_take(overrides: str, said: list[str]) -> None:
    text = refusal("recipe=lenet_fashion_mnist", overrides)
    assert all(part in text for part in said), text


def test_lenet_has_no_batch_norm_to_refuse_one_image_for() -> None:
    config = compose_config(["recipe=lenet_fashion_mnist", "train.micro_batch_size=1", "train.global_batch_size=2"])
    assert resolve(config).accumulation == 1


def test_fields_that_another_one_makes_idle_are_said() -> None:
    words = ["recipe=resnet8_fashion_mnist", "data.crop_padding=2", "data.crop_area=[0.2,1.0]", "bn.precise_batches=9"]
    assert batch_notes(compose_config(words), 1, data_ranks=2) == [
        "warning: data.crop_padding has no effect with data.crop=none",
        "warning: data.crop_area has no effect with data.crop=none",
        "warning: bn.precise_batches has no effect with bn.sync=pooled",
    ]
    assert batch_notes(compose_config(["recipe=resnet8_fashion_mnist"]), 1, data_ranks=2) == []
