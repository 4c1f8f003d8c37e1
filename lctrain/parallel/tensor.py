"""Tensor parallelism with sequence-parallel norms, from the model's own plan.

Between blocks a rank holds S / tp columns of the residual stream; attention and MLP gather them, compute
on their share of heads and widths, and scatter their sums back (Korthikanti et al., arXiv:2205.05198).
The embedding and the output layer are split over the vocabulary. Everything is a DTensor over the tp
axis afterwards, so that FSDP2, checkpoints and gradient norms compose without knowing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lctrain.errors import ModelError

# What transformers' plans call a split, as torch's styles. Outputs of row-wise layers go back to columns.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=Shard(1)),
    # Norms of single heads, [B, S, h, D]: each rank has its own heads and all of the weight.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def apply_tensor_parallel(hf: Any, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Split a Hugging Face causal LM (`hf`, on meta or not) over `mesh` (axis tp), in place.

    Raises ModelError for a model without a plan, or whose plan has splits that are not here.
    """
    plan = _layer_plan(hf)
    for layer in layers:
        parallelize_module(layer, mesh, {**_around(layer, plan), **{n: _STYLES[s]() for n, s in plan.items()}})
    decoder = hf.get_decoder()
    whole: dict[str, ParallelStyle] = {}
    names = {id(m): n for n, m in hf.named_modules()}
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = head.weight is embedding.weight
    whole[names[id(embedding)]] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
    )
    for name, module in decoder.named_children():
        if _is_norm(module):
            whole[names[id(decoder)] + "." + name] = SequenceParallel(use_local_output=True)
    if not tied:
        whole[names[id(head)]] = ColwiseParallel()
    parallelize_module(hf, mesh, whole)
    if tied:
        head.weight = embedding.weight


def _layer_plan(hf: Any) -> dict[str, str]:
    """Module name within a layer to the kind of split."""
    name = type(hf).__name__
    raw = hf.config.base_model_tp_plan or {}
    plan = {re.sub(r"^layers\.\*\.", "", k): v for k, v in raw.items() if k.startswith("layers.*.")}
    if not plan:
        raise ModelError(
            f"{name} has no tensor-parallel plan (base_model_tp_plan) in transformers; use parallel=fsdp_sp"
        )
    unknown = sorted({v for v in plan.values() if v not in _STYLES})
    if unknown:
        raise ModelError(
            f"{name}'s tensor-parallel plan splits layers by {', '.join(unknown)}, which parallel=fsdp_tp does not do "
            "(it does colwise and rowwise); use parallel=fsdp_sp or fsdp"
        )
    return plan


def _around(layer: nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Norms on columns, and the gathers in front of blocks whose parts are split."""
    styles: dict[str, ParallelStyle] = {}
    split = {name.split(".")[0] for name in plan}
    for name, child in layer.named_children():
        if name in split:
            styles[name] = _gather_input(child)
        elif _is_norm(child):
            styles[name] = SequenceParallel(use_local_output=True)
        elif any(True for _ in child.parameters()):
            raise ModelError(
                f"{type(layer).__name__}.{name} has parameters but no place in its tensor-parallel plan; "
                "use parallel=fsdp_sp or fsdp"
            )
    return styles


def _gather_input(block: nn.Module) -> PrepareModuleInput:
    """Columns to the whole sequence, kept a DTensor so that the gradients of its uses are summed by one scatter."""
    if "attn" in type(block).__name__.lower() or "attention" in type(block).__name__.lower():
        return PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__
