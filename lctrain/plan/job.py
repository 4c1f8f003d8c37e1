"""The regime's own job without its data: built, given a batch of the right shape, and stepped.

The same code runs on fake tensors for a plan (plan/simulate.py) and on real ones to check it (plan/measure.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lctrain.config.images import ImagesConfig
from lctrain.config.model import CausalLMConfig, ModelInit
from lctrain.config.root import TrainConfig
from lctrain.engines.base import Engine
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Kernel
from lctrain.ops.image_batch import ImageBatch
from lctrain.ops.text_batch import TextBatch
from lctrain.runtime.mesh import Mesh
from lctrain.train.session import Session
from lctrain.train.step import forward_backward

ASSUMED_CLASSES = 1000


class _Images:
    """What the image regime asks of data: classes and channels."""

    def __init__(self, classes: int, channels: int) -> None:
        self.manifest = self
        self.classes, self.channels = [""] * classes, channels


def without_data(config: TrainConfig, ranks: int) -> TrainConfig:
    """The job on so many ranks of one node, without what a plan does not read: data, tokenizer and weights."""
    config = copy.deepcopy(config)
    config.launch = replace(config.launch, nproc_per_node=None, default_ranks=ranks, nnodes=1)
    if isinstance(config.model, CausalLMConfig):
        config.model.init = ModelInit.random
        config.documents.path = config.documents.path or "unread"
        config.documents.tokenizer = config.documents.tokenizer or "byte"
        config.eval.every_steps = 0
        config.eval.every_epochs = 0
    else:
        config.images.source = config.images.source or "unread"
        config.image_model.path = None
    config.train.max_steps = config.train.max_steps or 1
    return config


def build(session: Session, mesh: Mesh, *, kernel: Kernel | None, real: bool) -> tuple[Any, list[nn.Module]]:
    """The regime's job, and its layers in order. kernel: attention's, None for the device's; real: give it weights."""
    if isinstance(session.config.model, CausalLMConfig):
        from lctrain.models.causal_lm import decoder_layers
        from lctrain.train.language import build_language

        language = build_language(session, mesh, init_weights=True if real else None, kernel=kernel)
        return language, decoder_layers(language.model)
    from lctrain.train.vision import build_vision

    images = _Images(ASSUMED_CLASSES, len(session.config.images.mean))
    vision = build_vision(session, mesh, images, init_weights=real)
    return vision, list(vision.model.stages)  # type: ignore[arg-type]


def make_batch(config: TrainConfig) -> Any:
    """A micro-batch of one document a sequence, or of images."""
    rows = config.train.micro_batch_size
    if isinstance(config.data, ImagesConfig):
        size, channels = config.images.image_size, len(config.images.mean)
        images = torch.zeros(rows, size, size, channels, dtype=torch.uint8)
        return ImageBatch(images, torch.zeros(rows, dtype=torch.long), rows)
    length = config.documents.max_length
    ids, positions, labels = (torch.zeros(rows, length, dtype=torch.long) for _ in range(3))
    return TextBatch(ids, positions, labels, Documents.from_lengths([length] * rows), rows * length, rows * length)


class _Phases:
    """An engine that says what comes next: `enter` is told each phase, `accumulated` called after a backward pass."""

    def __init__(self, engine: Engine, enter: Callable[[str], None], accumulated: Callable[[], None]) -> None:
        self._engine, self._enter, self._accumulated = engine, enter, accumulated
        self._micro_steps = 0

    @property
    def model(self) -> nn.Module:
        return self._engine.model

    @contextmanager
    def microstep(self, *, last: bool) -> Iterator[None]:
        self._micro_steps += 1
        with self._engine.microstep(last=last):
            self._enter(f"forward {self._micro_steps}")
            yield

    def backward(self, loss: torch.Tensor) -> None:
        self._enter(f"backward {self._micro_steps}")
        self._engine.backward(loss)
        self._accumulated()


def run_step(
    job: Any, batch: Any, micro_steps: int, enter: Callable[[str], None], accumulated: Callable[[], None] = lambda: None
) -> None:
    """A step of the trainer, with one batch as every micro-batch.

    enter: told what comes next. accumulated: called after each backward pass.
    """
    phases: Any = _Phases(job.engine, enter, accumulated)
    forward_backward(phases, job.objective, job.mesh, [batch] * micro_steps, 1.0)
    enter("optimizer")
    job.engine.step(0.0)
    job.step_done(1)
