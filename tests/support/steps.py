"""A few bare steps of the real engine on TinyData, and whole copies of what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.run import full
from tests.support.tiny import tiny_data


def take_steps(
    language: Any,
    steps: int,
    *,
    start: int = 0,
    spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, loss: loss,
) -> list[Any]:
    """StepResults of `steps` updates from step `start`; `spoil` may change a rank's loss."""
    from lctrain.data.order import SampleOrder

    config = language.session.config
    data = tiny_data(language.hf_config.vocab_size)
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)
    results = []
    for step, micro in language.loader(data, order).iterate(start, start + steps):
        (count,), _ = language.mesh.sum_over_data([sum(language.objective.work(b).count for b in micro)])
        for i, batch in enumerate(micro):
            with language.engine.microstep(last=i == len(micro) - 1):
                loss = language.objective.loss_sum(language.engine.model, language.objective.shard(batch))
                language.engine.backward(spoil(step, loss) / count)
        results.append(language.engine.step(config.optim.lr))
    return results


def one_step(language: Any, step: int) -> tuple[float, float]:
    """(mean loss, gradient norm) of update number `step`, under any engine."""
    from lctrain.data.order import SampleOrder
    from lctrain.train.step import forward_backward

    config, data = language.session.config, tiny_data(language.hf_config.vocab_size)
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)
    micro = language.loader(data, order).batches(step)
    (count,), _ = language.mesh.sum_over_data([sum(b.count for b in micro)])
    loss = forward_backward(language.engine, language.objective, language.mesh, micro, count).mean
    return loss, language.engine.step(config.optim.lr).grad_norm


def parameters_of(language: Any) -> dict[str, Any]:
    """Whole parameters by name, as numpy."""
    return {name: full(p).float().cpu().numpy() for name, p in language.model.named_parameters()}


def optimizer_state_of(language: Any) -> dict[str, Any]:
    """Whole optimizer state by parameter name and key, as numpy."""
    state = language.engine.optimizer.state
    return {
        f"{name}.{key}": full(value).cpu().numpy()
        for name, p in language.model.named_parameters()
        for key, value in state.get(p, {}).items()
    }


def is_tied(language: Any) -> bool:
    """Whether input and output embedding are one parameter."""
    hf = language.model.model
    return hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
