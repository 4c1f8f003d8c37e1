"""An MLPerf training log of a ResNet run (rules of ruleset 4.0.0, the last with ResNet), in the open division.

One JSON object a line after a fixed prefix; https://github.com/mlcommons/logging has the format and the checker.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lctrain.config.optim import LarsConfig
from lctrain.config.root import TrainConfig
from lctrain.config.schedule import DecayConfig
from lctrain.optim.lars import EPS
from lctrain.optim.schedule import warmup_steps
from lctrain.train.callbacks.base import Callback
from lctrain.train.checkpoint import TrainState


@dataclass(frozen=True)
class Job:
    """What the log says of a job besides its configuration. began: seconds since 1970, before anything was built."""

    began: float
    train_samples: int
    eval_samples: int
    accumulation: int
    platform: str


class MlperfLog(Callback):
    """Writes mlperf.log. A log holds one run from start to stop: what was there is moved to mlperf-1.log, -2, ..."""

    def __init__(self, path: Path, config: TrainConfig, job: Job) -> None:
        self._path, self._config, self._job = path, config, job
        self._per_epoch = job.train_samples / config.train.global_batch_size
        self._total = 0
        self._block: dict[str, Any] = {}
        if path.is_file():
            path.rename(next(p for n in count(1) if not (p := path.with_stem(f"{path.stem}-{n}")).exists()))

    def start(self, state: TrainState, total_steps: int) -> None:
        """Everything up to the first step."""
        job, self._total = self._job, total_steps
        self._point("cache_clear", True, at=job.began)
        self._mark("init_start", at=job.began)
        for key, value in {
            "submission_benchmark": "resnet",
            "submission_org": "lctrain",
            "submission_division": "open",
            "submission_status": "research",
            "submission_platform": job.platform,
            "seed": self._config.seed,
            "global_batch_size": self._config.train.global_batch_size,
            "gradient_accumulation_steps": job.accumulation,
            "train_samples": job.train_samples,
            "eval_samples": job.eval_samples,
        }.items():
            self._point(key, value)
        for key, value in self._optimizer(total_steps).items():
            self._point(key, value)
        self._mark("init_stop")
        self._mark("run_start")
        self._begin_block(state.step)

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """A block ends with the accuracy it reached."""
        where = {"epoch_num": round(step / self._per_epoch, 4)}
        self._end_block()
        self._mark("eval_start", metadata=where)
        self._point("eval_accuracy", metrics["top1"], metadata=where)
        self._mark("eval_stop", metadata=where)
        self._begin_block(step)

    def close(self, status: str) -> None:
        """The run's stop."""
        self._end_block()
        self._mark("run_stop", metadata={"status": "success" if status == "completed" else "aborted"})

    def _optimizer(self, total_steps: int) -> dict[str, Any]:
        """The closed division's keys, in its names."""
        config = self._config
        lr = config.optim.peak_lr(config.train.global_batch_size)
        if not isinstance(config.optim, LarsConfig):
            return {"opt_name": config.optim.kind, "opt_base_learning_rate": lr}
        schedule, optim = config.schedule, config.optim
        warmup = warmup_steps(schedule, total_steps, steps_per_epoch=self._per_epoch)
        floor = lr
        if isinstance(schedule, DecayConfig):
            floor = schedule.min_lr_ratio * lr if schedule.end_lr is None else schedule.end_lr
        return {
            "opt_name": "lars",
            "lars_opt_base_learning_rate": lr,
            "lars_opt_end_learning_rate": floor,
            "lars_opt_learning_rate_decay_poly_power": getattr(schedule, "power", 1),
            "lars_opt_learning_rate_decay_steps": total_steps - warmup,
            "lars_opt_learning_rate_warmup_epochs": warmup / self._per_epoch,
            "lars_opt_momentum": optim.momentum,
            "lars_opt_weight_decay": optim.weight_decay,
            "lars_epsilon": EPS[optim.form] if optim.eps is None else optim.eps,
        }

    def _begin_block(self, step: int) -> None:
        """A block lasts until the next evaluation, or to the end."""
        if step >= self._total:
            return
        evaluation = self._config.eval
        every = evaluation.every_epochs or evaluation.every_steps / self._per_epoch
        left = (self._total - step) / self._per_epoch
        self._block = {"first_epoch_num": round(step / self._per_epoch, 4) + 1}
        self._mark("block_start", metadata=self._block | {"epoch_count": round(min(every or left, left), 4)})

    def _end_block(self) -> None:
        if self._block:
            self._mark("block_stop", metadata=self._block)
        self._block = {}

    def _mark(self, key: str, *, metadata: dict[str, Any] | None = None, at: float | None = None) -> None:
        kind = "INTERVAL_START" if key.endswith("_start") else "INTERVAL_END"
        self._write(kind, key, None, metadata or {}, at)

    def _point(self, key: str, value: Any, *, metadata: dict[str, Any] | None = None, at: float | None = None) -> None:
        self._write("POINT_IN_TIME", key, value, metadata or {}, at)

    def _write(self, kind: str, key: str, value: Any, metadata: dict[str, Any], at: float | None) -> None:
        line = {
            "namespace": "",
            "time_ms": round(1000 * (time.time() if at is None else at)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "lctrain", "lineno": 0, **metadata},
        }
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(f":::MLLOG {json.dumps(line)}\n")
