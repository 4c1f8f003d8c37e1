"""The LeNet recipe on Fashion-MNIST itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import lctrain, summary
from tests.support.images import checked

FASHION = Path("/usr/share/datasets/fashion-mnist")
needs_fashion = pytest.mark.skipif(
    not FASHION.is_dir(), reason="Fashion-MNIST is not here: apt-get install dataset-fashion-mnist"
)


@needs_fashion
def test_lenet_learns_fashion_mnist_in_an_epoch(tmp_path: Path) -> None:
    words = ["recipe=lenet_fashion_mnist", f"data.cache={tmp_path / 'cache'}", "logging.tensorboard=false"]
    run, single = tmp_path / "run", tmp_path / "single"
    done = lctrain(*words, "train.max_epochs=1", "logging.mlperf=true", f"run_dir={run}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = summary(run)
    assert told["metrics"]["top1"] > 0.75
    assert told["metrics"]["eval_samples"] == 10_000
    assert (told["world_size"], told["steps"]) == (2, 468)
    assert checked(run) == 0
    one = ["parallel=single", "train.max_steps=1", "checkpoint.save_at_end=false", "eval.max_sequences=64"]
    done = lctrain(*words, *one, f"run_dir={single}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(single)["first_loss"] == pytest.approx(told["first_loss"], rel=1e-4)
