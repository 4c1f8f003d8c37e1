"""What one operation costs, whatever the device: arithmetic, memory traffic and messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# kind of message by the name of the operation, c10d's (FSDP2, DDP, Ulysses, rings) and DTensor's.
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
}
_FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
    aten.detach.default,
    aten.lift_fresh.default,
}


@dataclass(frozen=True)
class Operation:
    """One operation of one rank.

    flops: floating-point operations of matrix multiplications, convolutions and attention; 0 for the others.
    bytes: read and written. dtype: of the arithmetic. collective: None, or the kind of message, and then `bytes` is
    the whole of it (of every rank, for a gather or a scatter) and `ranks` how many exchange it. hidden: the layout
    runs it beside computation (gathers and reductions of parameters and gradients, a ring's blocks); span: from the
    first to the last of those ranks.
    """

    phase: str
    flops: float = 0.0
    bytes: float = 0.0
    dtype: torch.dtype = torch.float32
    collective: str | None = None
    ranks: int = 1
    span: int = 1
    hidden: bool = False
    attention: bool = False


def cost_of(
    func: Any, args: Sequence[Any], out: Any, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor], phase: str
) -> Operation | None:
    """The cost of `func`, which gave `out`; None for empty tensors, which move nothing.

    inputs, made: the tensors among args and in `out`.
    """
    space = func.namespace
    if space in ("c10d", "_c10d_functional"):
        return _message(func, args, inputs, made, phase)
    if func in _FREE or not (inputs or made):
        return None
    moved = sum(_bytes(x) for x in inputs) + sum(_bytes(x) for x in made if not any(x is i for i in inputs))
    packet = func.overloadpacket
    flops = 0.0
    if packet in _WHOLE:
        flops = _WHOLE[packet](*args)
        if packet in (aten.matmul_backward, aten.linear_backward):
            # Two products, each of which reads or writes all three matrices.
            moved = sum(_bytes(x) for x in args[:3]) * sum(args[3][:2])
    elif packet in flop_registry:
        flops = float(flop_registry[packet](*args, out_val=out))
    dtype = inputs[0].dtype if inputs else made[0].dtype
    return Operation(phase, flops, moved, dtype)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> float:
    """Every row of `a` meets every column of `b`, in each of the matrices that broadcasting makes of them."""
    columns = b.shape[-1] if b.ndim > 1 else 1
    rows = a.shape[-2] if a.ndim > 1 else 1
    return 2.0 * math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * rows * a.shape[-1] * columns


def _matmul_backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: Sequence[bool]) -> float:
    return _matmul(a, b) * sum(wanted)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    return 2.0 * x.numel() * weight.shape[0]


def _linear_backward(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]) -> float:
    return _linear(x, weight) * sum(wanted[:2])


# What torch_npu computes as one operation, and other devices as the products that torch's registry knows.
_WHOLE: dict[Any, Callable[..., float]] = {
    aten.matmul: _matmul,
    aten.matmul_backward: _matmul_backward,
    aten.linear: _linear,
    aten.linear_backward: _linear_backward,
}


def _message(
    func: Any, args: Sequence[Any], inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor], phase: str
) -> Operation | None:
    name = func.overloadpacket.__name__
    kind = _COLLECTIVES.get(name)
    if kind is None:
        return None  # barriers, waits, the receiving end of a message
    members = next(found for a in args if (found := _members(a)) is not None)
    # A gather's or scatter's message is its larger side.
    size = max(_bytes(x) for x in [*inputs, *made]) if kind != "all_reduce" else sum(_bytes(x) for x in inputs)
    asynchronous = func.namespace == "c10d" and kind in ("all_gather", "reduce_scatter", "all_reduce", "send", "reduce")
    return Operation(
        phase,
        bytes=size,
        dtype=inputs[0].dtype,
        collective=kind,
        ranks=len(members),
        span=max(members) - min(members) + 1,
        hidden=asynchronous,
    )


def _members(argument: Any) -> list[int] | None:
    """The ranks of a process group, given as c10d or DTensor pass it; None for another argument."""
    try:
        if isinstance(argument, str):
            argument = dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[arg-type]
        elif isinstance(argument, torch.ScriptObject):
            argument = dist.ProcessGroup.unbox(argument)
        else:
            return None
        return dist.get_process_group_ranks(argument)
    except (RuntimeError, LookupError, ValueError):
        return None


def _bytes(x: torch.Tensor) -> float:
    """Of the elements a tensor addresses; an expanded one has fewer in memory."""
    size = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        if stride != 0:
            size *= length
    return float(size * x.itemsize)
