"""Train TinyData for a few steps with the real parts, on the ranks of a pool or on none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lctrain.config.plain import from_plain
from lctrain.ops.shards import full_shape
from lctrain.runtime.process import Ranks
from tests.support.tiny import tiny_data


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole copy of a parameter or gradient, whatever shards it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def whole_parameters(language: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, a whole copy of the master weight) under any engine; DeepSpeed has one of what it trains alone."""
    for name, p in language.engine.module.named_parameters():
        if hasattr(language.engine, "_zero"):
            if not p.requires_grad:
                continue
            from deepspeed.utils import safe_get_full_fp32_param

            yield name, safe_get_full_fp32_param(p).detach().clone().view(full_shape(p))
        else:
            yield name, full(p)


def build(ranks: Ranks, plain: dict[str, Any]) -> tuple[Any, Any]:
    """(session, language) of a config on these ranks, whose process group exists."""
    from lctrain.runtime.mesh import Mesh
    from lctrain.train.language import build_language
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag

    session = Session(from_plain(plain), ranks, dist.HashStore(), StopFlag())
    session.log = lambda line: None  # type: ignore[assignment]
    mesh = Mesh(session.resolved.sizes, session.device)
    return session, build_language(session, mesh, init_weights=True)


def train_tiny(ranks: Ranks, plain: dict[str, Any], *, steps: int = 3) -> dict[str, Any]:
    """Losses, gradient norms and final parameters (by name, as numpy) of a few steps on TinyData."""
    from lctrain.data.order import SampleOrder
    from lctrain.optim.schedule import lr_factor
    from lctrain.train.trainer import Limits, Trainer

    session, language = build(ranks, plain)
    config = session.config
    data = tiny_data(language.hf_config.vocab_size)
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)
    recorder = Recorder()
    trainer = Trainer(
        engine=language.engine,
        objective=language.objective,
        batches=language.loader(data, order),
        mesh=language.mesh,
        limits=Limits(steps, 20, 2.0),
        lr_at=lambda step: config.optim.lr * lr_factor(config.schedule, step, steps),
        save=lambda state: None,
        evaluate=None,
        stop=session.stop,
        seed=config.seed,
        callbacks=[recorder],
        first_step_done=language.first_step_done,
    )
    trainer.fit()
    parameters = {name: whole.float().cpu().numpy() for name, whole in whole_parameters(language)}
    return {"loss": recorder.losses, "grad_norm": recorder.norms, "parameters": parameters}


class Recorder:
    """A callback that keeps losses and norms, on every rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step_end(self, record: Any) -> None:
        """Keep."""
        self.losses.append(record.loss)
        self.norms.append(record.grad_norm)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None
