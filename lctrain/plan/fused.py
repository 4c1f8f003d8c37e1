"""Ascend's fused operators in a plan on another device's fake tensors: what they make, keep and move.

As torch_npu's: the norm keeps its input and one fp32 number a row, SwiGLU and the rotary embedding keep their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lctrain.ops import npu_fused
from lctrain.plan.cost import Operation
from lctrain.plan.trace import Trace


@contextmanager
def planned_operators(trace: Trace) -> Iterator[None]:
    """Let lctrain/ops/npu_fused.py call operators of shapes alone, which `trace` counts."""

    def counted(operator: Any, *tensors: torch.Tensor) -> Any:
        return operator.apply(trace, *tensors)

    operators = SimpleNamespace(
        npu_rms_norm=lambda x, weight, eps: (counted(_RmsNorm, x, weight),),
        npu_swiglu=lambda x, dim: counted(_SwiGlu, x),
        npu_rotary_mul=lambda x, cos, sin: counted(_Rotary, x, cos, sin),
    )
    original = npu_fused._ops
    npu_fused._ops = lambda: operators
    try:
        yield
    finally:
        npu_fused._ops = original


def _move(trace: Trace, *tensors: torch.Tensor) -> None:
    moved = float(sum(x.numel() * x.itemsize for x in tensors))
    with trace.counted_as(Operation(trace.phase, bytes=moved, dtype=tensors[0].dtype)):
        pass


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trace: Trace, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        _move(trace, x, weight, y, inverse)
        ctx.save_for_backward(x, weight, inverse)
        ctx.trace = trace
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        _move(ctx.trace, grad, x, weight, inverse, dx, dweight)
        return None, dx, dweight


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trace: Trace, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        _move(trace, x, y)
        ctx.save_for_backward(x)
        ctx.trace = trace
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _move(ctx.trace, grad, x, dx)
        return None, dx


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trace: Trace, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _move(trace, x, cos, sin, y)
        ctx.save_for_backward(x, cos, sin)
        ctx.trace = trace
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _move(ctx.trace, grad, cos, sin, dx)
        return None, dx, None, None
