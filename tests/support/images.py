"""A tiny classifier, random images and the real parts around them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from lctrain.config.compose import compose_config
from lctrain.config.plain import from_plain
from lctrain.config.root import TrainConfig
from lctrain.runtime.process import Ranks
from tests.support.run import Recorder, full

SIDE, COUNT, CLASSES = 8, 30, 6


def write_images(folder: Path) -> Path:
    """COUNT training and 11 validation images as idx files; an odd number, so that ranks get unequal shares."""
    from tests.unit.data.small_images import idx_bytes

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", COUNT), ("t10k", 11)):
        labels = (np.arange(count) % CLASSES).astype(np.uint8)
        pixels = rng.integers(0, 255, (count, SIDE, SIDE), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return folder


def image_config(folder: Path, *overrides: str) -> TrainConfig:
    """resnet8_fashion_mnist shrunk to the images of write_images, constant lr without warm-up or augmentation."""
    return compose_config(
        [
            "recipe=resnet8_fashion_mnist",
            "model.width=4",
            "model.zero_init_last_gamma=false",
            f"data.source={folder / 'source'}",
            f"data.cache={folder / 'cache'}",
            f"data.image_size={SIDE}",
            "data.crop=none",
            "data.flip=false",
            "train.global_batch_size=8",
            "train.micro_batch_size=2",
            "train.max_steps=3",
            "train.max_epochs=null",
            "optim.base_lr_per=null",
            "schedule=constant",
            "schedule.warmup_epochs=0",
            "logging.pictures=false",
            "logging.tensorboard=false",
            *overrides,
        ]
    )


def build_images(ranks: Ranks, plain: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """(session, job, splits by name) of a config on these ranks, whose process group exists; images are staged."""
    from lctrain.data.images.prepare import prepare_images
    from lctrain.runtime.mesh import Mesh
    from lctrain.train.regime import build_job
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag

    session = Session(from_plain(plain), ranks, dist.HashStore(), StopFlag())
    session.log = lambda line: None  # type: ignore[assignment]
    quiet = lambda line: None  # noqa: E731
    splits = {name: prepare_images(session.config.images, split=name, report=quiet) for name in ("train", "eval")}  # type: ignore[arg-type]
    mesh = Mesh(session.resolved.sizes, session.device)
    return session, build_job(session, mesh, splits["train"], init_weights=True), splits


def image_trainer(session: Any, job: Any, splits: dict[str, Any], *, steps: int, recorder: Any, **more: Any) -> Any:
    """A trainer of so many steps; `more` are further fields of it."""
    from lctrain.data.order import SampleOrder
    from lctrain.optim.schedule import lr_factor
    from lctrain.train.trainer import Limits, Trainer

    config = session.config
    size = config.train.global_batch_size
    order = SampleOrder(size=len(splits["train"]), seed=config.seed, global_batch_size=size)
    fields: dict[str, Any] = {"save": lambda state: None} | more
    return Trainer(
        engine=job.engine,
        objective=job.objective,
        batches=job.loader(splits["train"], order),
        mesh=job.mesh,
        limits=Limits(steps, 20, 2.0),
        lr_at=lambda step: config.optim.peak_lr(size) * lr_factor(config.schedule, step, steps),
        evaluate=lambda: job.evaluate(splits["eval"], while_training=True),
        stop=session.stop,
        seed=config.seed,
        callbacks=[recorder],
        step_done=job.step_done,
        **fields,
    )


def train_images(ranks: Ranks, plain: dict[str, Any], *, steps: int = 3) -> dict[str, Any]:
    """Losses, gradient norms, metrics, final parameters and running statistics (by name, as numpy)."""
    session, job, splits = build_images(ranks, plain)
    recorder = Recorder()
    trainer = image_trainer(session, job, splits, steps=steps, recorder=recorder)
    trainer.fit()
    return {
        "loss": recorder.losses,
        "grad_norm": recorder.norms,
        "metrics": trainer.metrics,
        "parameters": {n: full(p).float().numpy() for n, p in job.engine.module.named_parameters()},
        "buffers": {n: b.float().numpy() for n, b in job.engine.module.named_buffers()},
    }


def checked(run: Path) -> int:
    """The exit code of the official checker on a run's MLPerf log."""
    words = ["--usage", "training", "--ruleset", "4.0.0", "--log_output", str(run / "checked.txt")]
    return subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", *words, str(run / "mlperf.log")],
        capture_output=True, check=False,
    ).returncode  # fmt: skip
