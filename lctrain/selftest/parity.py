"""Rows of the parity table on this machine's devices: a few updates under each layout, against one CPU rank.

Sequences are packs of unequal documents, one of them a long prompt without labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from lctrain.config.parallel import (
    DdpConfig,
    FsdpConfig,
    FsdpCpConfig,
    FsdpSpConfig,
    HsdpConfig,
    ParallelConfig,
    SingleConfig,
    Zero3Config,
    ZeroConfig,
)
from lctrain.config.precision import Bf16Config, Fp16Config, Fp32Config, PrecisionConfig
from lctrain.config.root import TrainConfig
from lctrain.data.loader import batch_of
from lctrain.data.order import SampleOrder
from lctrain.data.pieces import Piece, piece_of
from lctrain.models.build import set_first_weights
from lctrain.models.materialize import materialize_empty
from lctrain.ops.attention.interface import attend_batch
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.optim.build import build_optimizer, optimizer_groups
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.overflow import overflow_flag
from lctrain.runtime.seed import weights_seed
from lctrain.selftest.row import Row, farthest
from lctrain.train.language import build_language
from lctrain.train.language_input import build_meta, read_model
from lctrain.train.session import Session
from lctrain.train.step import forward_backward

SECTION = "parity"
STEPS = 3
_LENGTH = 96


@dataclass(frozen=True)
class Sequences:
    """What the loader asks of data."""

    rows: tuple[tuple[Piece, ...], ...]
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> list[Piece]:
        """The pieces of a sequence."""
        return list(self.rows[index])


@dataclass
class Run:
    """Mean loss and gradient norm of each step, and the first step's gradients, whole on the host."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def parity_rows(session: Session) -> Iterator[Row]:
    """Rows of every layout and precision; only the first rank's mean anything. A collective over all ranks."""
    right = _alone(session) if session.ranks.is_main else Run()
    half: PrecisionConfig = Bf16Config() if session.device.supports_bf16() else Fp16Config()
    verify = session.config.verify
    meshes: dict[str, Mesh] = {}
    for layout in layouts(session.ranks.world_size):
        for precision, tolerance in ((Fp32Config(), verify.tolerance), (half, verify.half_tolerance)):
            if isinstance(layout, ZeroConfig) and isinstance(precision, Fp16Config) and overflow_flag(session.device):
                continue  # Session.check refuses it
            this = replace(session, config=replace(session.config, parallel=layout, precision=precision))
            this.log = lambda line: None  # type: ignore[assignment]
            name = f"{layout.kind}, {precision.kind}"
            # One mesh a layout: every communicator takes memory of the cards for good.
            if layout.kind not in meshes:
                meshes[layout.kind] = Mesh(this.resolved.sizes, this.device)
            try:
                run = _under(this, meshes[layout.kind])
            except RuntimeError as failure:
                yield Row(SECTION, name, str(failure).strip().partition("\n")[0], math.inf, tolerance)
                continue
            session.device.empty_cache()  # each layout meets the allocator as a job of its own would
            if session.ranks.is_main:
                yield from _compare(name, run, right, tolerance)


def layouts(ranks: int) -> list[ParallelConfig]:
    """Every kind of layout that so many ranks allow and whose packages are here."""
    if ranks == 1:
        return [SingleConfig(), FsdpConfig()]
    found: list[ParallelConfig] = [DdpConfig(), FsdpConfig(), FsdpSpConfig(), FsdpCpConfig()]
    if ranks % 2 == 0 and ranks > 2:
        found.append(HsdpConfig())
    if find_spec("deepspeed") is not None:
        found.append(Zero3Config())
    return found


def sequences(config: TrainConfig) -> Sequences:
    """Twice as many as a global batch, of unequal lengths."""
    rng = np.random.default_rng(config.seed)
    words = int(config.language_model.architecture["vocab_size"])
    rows = []
    for number in range(2 * config.train.global_batch_size):
        cuts = np.sort(rng.choice(np.arange(1, _LENGTH), 1 + number % 3, replace=False))
        lengths = np.diff([0, *cuts, _LENGTH - 7 * (number % 2)]).clip(1)
        mask = [np.arange(n) >= (n - 2 if number == 1 else 0) for n in lengths]
        rows.append(
            tuple(piece_of(rng.integers(0, words, n).astype(np.int32), m) for n, m in zip(lengths, mask, strict=True))
        )
    return Sequences(tuple(rows))


def _order(config: TrainConfig, data: Sequences) -> SampleOrder:
    return SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)


def _alone(session: Session) -> Run:
    """The right answer: this rank's CPU, whole sequences one after another, torch's optimizer."""
    config, run = session.config, Run()
    data = sequences(config)
    order = _order(config, data)
    model = build_meta(session, read_model(session))
    model.route_attention(partial(attend_batch, ReferenceKernel()))
    materialize_empty(model, torch.device("cpu"))
    set_first_weights(model, config.language_model, seed=weights_seed(config.seed))
    optimizer = build_optimizer(config.optim, optimizer_groups(config.optim, model), peak_lr=config.optim.lr)
    for step in range(STEPS):
        batches = [batch_of(data, np.array([index])) for index in order.step_indices(step)]  # type: ignore[arg-type]
        count = sum(b.count for b in batches)
        losses = [model(b.input_ids, b.position_ids, b.labels, b.documents) / count for b in batches]
        loss = torch.stack(losses).sum()
        loss.backward()
        run.losses.append(float(loss.detach()))
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        run.norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm or math.inf))
        )
        optimizer.step()
        optimizer.zero_grad()
    return run


def _under(session: Session, mesh: Mesh) -> Run:
    """The same steps under the session's layout, on its devices."""
    language: Any = build_language(session, mesh, init_weights=True)
    data: Any = sequences(session.config)
    loader, run = language.loader(data, _order(session.config, data)), Run()
    for step in range(STEPS):
        micro = loader.batches(step)
        (count,), _ = mesh.sum_over_data([sum(b.count for b in micro)])
        run.losses.append(forward_backward(language.engine, language.objective, mesh, micro, count).mean)
        if step == 0:
            run.gradients = {name: grad.detach().float().cpu() for name, grad in language.engine.gradients()}
        run.norms.append(language.engine.step(session.config.optim.lr).grad_norm)
    return run


def _compare(name: str, run: Run, right: Run, tolerance: float) -> Iterator[Row]:
    for what, got, wanted in (("loss", run.losses, right.losses), ("gradient norm", run.norms, right.norms)):
        _, error = farthest({str(n): abs(a - b) / abs(b) for n, (a, b) in enumerate(zip(got, wanted, strict=True))})
        yield Row(
            SECTION, f"{name}: {what}", f"{STEPS} steps, the last {got[-1]:.7g}, CPU {wanted[-1]:.7g}", error, tolerance
        )
    errors = {n: float((g - right.gradients[n]).norm() / right.gradients[n].norm()) for n, g in run.gradients.items()}
    worst, error = farthest(errors)
    if right.gradients.keys() - errors.keys():
        error = math.inf
    yield Row(SECTION, f"{name}: gradients", f"{len(errors)} of them, the farthest {worst}", error, tolerance)
