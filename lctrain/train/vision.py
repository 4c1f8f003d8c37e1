"""The image regime's parts: model, engine, objective and data of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lctrain.config.batch_norm import BnStatistics, BnSync
from lctrain.config.images import ImagesConfig
from lctrain.config.parallel import FsdpConfig
from lctrain.data.images.loader import ImageLoader, choose_workers, image_eval_batches
from lctrain.data.images.storage import source_bytes
from lctrain.data.images.store import ImageStore
from lctrain.data.order import SampleOrder
from lctrain.engines.base import Engine
from lctrain.engines.build import build_engine
from lctrain.engines.native import NativeEngine
from lctrain.models.batch_norm import configure_batch_norm, has_batch_norm
from lctrain.models.image_model import build_image_model, image_flops, to_channels_last, weights_hash
from lctrain.objectives.classification import ClassificationObjective
from lctrain.ops.image_batch import ImageBatch
from lctrain.optim.ema import Ema
from lctrain.parallel.apply import apply_layout
from lctrain.parallel.batch_norm import BatchNormStatistics
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.seed import weights_seed
from lctrain.train.callbacks.base import Callback
from lctrain.train.callbacks.mlperf import Job as MlperfJob
from lctrain.train.callbacks.mlperf import MlperfLog
from lctrain.train.evaluate import evaluate
from lctrain.train.image_input import shape_of
from lctrain.train.run_dir import RunDir
from lctrain.train.samples import MOST, draw_samples
from lctrain.train.session import Session
from lctrain.train.weights import same_everywhere


@dataclass
class Vision:
    """A classifier, laid out. statistics: of its BatchNorm layers. ema: its moving average, if there is one."""

    session: Session
    mesh: Mesh
    model: nn.Module
    engine: Engine
    objective: ClassificationObjective
    statistics: BatchNormStatistics
    ema: Ema | None
    _step: int = 0
    _batches: ImageLoader | None = field(default=None)
    _staged: int = field(default_factory=source_bytes)

    def loader(self, data: ImageStore, order: SampleOrder) -> ImageLoader:
        """This data rank's training batches."""
        prefetch = self.session.config.data.prefetch
        self._batches = self._loader(data, order, workers=self._workers(data), prefetch=prefetch)
        return self._batches

    def data_report(self, epochs: float) -> dict[str, Any]:
        """Bytes read from the source (an object store's, say): before training, and for each epoch of it."""
        return {
            "source_bytes_staged": self._staged,
            "source_bytes_per_epoch": (source_bytes() - self._staged) / epochs if epochs else 0.0,
        }

    def _loader(self, data: ImageStore, order: SampleOrder, *, workers: int, prefetch: int) -> ImageLoader:
        config = self.session.config
        return ImageLoader(
            data,
            cfg=self._data,
            # Training ends before a step that images do not fill; recomputing statistics goes on past it.
            order=replace(order, limit=None),
            seed=config.seed,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.sizes.data,
            micro_batch_size=config.train.micro_batch_size,
            workers=workers,
            prefetch=prefetch,
            report=self.session.log,
        )

    def callbacks(self, run_dir: Path, data: dict[str, Any], order: SampleOrder) -> list[Callback]:
        """An MLPerf log. Class names, and pictures of what training will see, are written at once."""
        logging, train = self.session.config.logging, data["train"]
        RunDir(run_dir).write_classes(train.manifest.classes)
        if logging.pictures:
            batch = self._loader(train, order, workers=0, prefetch=0).first(MOST)
            draw_samples(batch.images, batch.labels.tolist(), train.manifest.classes, run_dir / "samples.png")
        if not logging.mlperf:
            return []
        job = MlperfJob(
            began=self.session.began,
            train_samples=len(train),
            eval_samples=min(len(data["eval"] or ()), self.session.config.eval.max_sequences or sys.maxsize),
            accumulation=self.session.resolved.accumulation,
            platform=f"{self.mesh.sizes.world} x {self.mesh.device.name}",
        )
        return [MlperfLog(run_dir / "mlperf.log", self.session.config, job)]

    def evaluate(self, data: ImageStore, *, while_training: bool) -> dict[str, float]:
        """Loss, top-1 and top-5, each image once; the moving average's too. A collective over all ranks."""
        if while_training:
            self._synchronise()
        metrics = self._evaluate(data)
        if self.ema is not None:
            with self.ema.used():
                metrics |= {
                    f"ema_{name}": value for name, value in self._evaluate(data).items() if "samples" not in name
                }
        return metrics

    def first_step_done(self) -> None:
        """Nothing to check."""

    def step_done(self, step: int) -> None:
        """Average the weights."""
        self._step = step
        if self.ema is not None:
            self.ema.update(step)

    def before_save(self) -> None:
        """A checkpoint holds one set of running statistics. A collective over all ranks."""
        self._synchronise()

    @property
    def _data(self) -> ImagesConfig:
        return self.session.config.images

    def _workers(self, data: ImageStore) -> int:
        raw = data.manifest.raw_shape is not None
        return choose_workers(self._data, self.session.ranks.local_world_size, raw=raw)

    def _evaluate(self, data: ImageStore) -> dict[str, float]:
        config = self.session.config
        batches = image_eval_batches(
            data,
            cfg=self._data,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.sizes.data,
            micro_batch_size=config.train.micro_batch_size,
            max_images=config.eval.max_sequences,
            report=self.session.log,
            workers=self._workers(data),
        )
        return evaluate(self.engine, self.objective, batches, self.mesh)

    def _synchronise(self) -> None:
        versions = (nullcontext,) if self.ema is None else (nullcontext, self.ema.used)
        self.statistics.synchronise(self._training_batches, self._forward, versions=versions)

    def _training_batches(self) -> Iterable[ImageBatch]:
        """bn.precise_batches micro-batches from where training is."""
        assert self._batches is not None
        wanted = self.session.config.bn.precise_batches
        steps = -(-wanted // self._batches.accumulation)
        return islice(_flat(self._batches.iterate(self._step, self._step + steps)), wanted)

    def _forward(self, batch: ImageBatch) -> object:
        with self.engine.autocast():
            return self.engine.module(self.objective.normalise(self.objective.shard(batch).images))


def _flat(steps: Iterator[tuple[int, list[ImageBatch]]]) -> Iterator[ImageBatch]:
    for _, micro in steps:
        yield from micro


def build_vision(session: Session, mesh: Mesh, data: Any, *, init_weights: bool) -> Vision:
    """Build with the seed's weights on every rank, lay out, and wrap.

    Raises ModelError or ConfigError; RuntimeError when ranks end up with different weights.
    """
    config, log = session.config, session.log
    classes, channels = shape_of(session, data)
    size = config.images.image_size
    model = build_image_model(
        config.image_model, classes=classes, channels=channels, image_size=size, seed=weights_seed(config.seed)
    )
    if init_weights:
        digest = weights_hash(model)
        same_everywhere(digest)
        source = config.image_model.path or f"random from seed {config.seed}"
        log(f"weights: {source}, equal on every rank ({digest[:12]})")
    flops = image_flops(model, channels=channels, image_size=size)
    if has_batch_norm(model):
        momentum = configure_batch_norm(model, config.bn, images=config.train.micro_batch_size, group=None)
        log(f"BatchNorm: {config.bn.statistics.name} statistics, momentum {momentum:.4g}, ranks' {config.bn.sync.name}")
    if not isinstance(config.parallel, FsdpConfig):  # which shards contiguous weights only; activations are anyway
        to_channels_last(model)
    model.to(mesh.device.torch_device)
    # SyncBN's agree already.
    synced = config.bn.statistics is BnStatistics.sync and config.bn.sync is not BnSync.precise
    statistics = BatchNormStatistics(model, BnSync.none if synced else config.bn.sync)
    # fp32 shards and autocast, which knows that BatchNorm keeps to fp32.
    apply_layout(
        model,
        model.stages,
        parallel=config.parallel,
        memory=config.memory,
        mesh=mesh,
        compute_dtype=torch.float32,
    )
    engine = build_engine(model, session.resolved, mesh, autocast_dtype=session.compute_dtype, report=log)
    ema = None
    if config.classification.ema_decay is not None:
        ema = Ema(model, config.classification.ema_decay)
        assert isinstance(engine, NativeEngine)
        engine.companions = {f"ema.{name}": tensor for name, tensor in ema.tensors.items()}
    objective = ClassificationObjective(
        mesh, config.classification, mean=config.images.mean, std=config.images.std, flops=flops
    )
    return Vision(session, mesh, model, engine, objective, statistics, ema)
