"""Ascend's fused RMSNorm, SwiGLU and rotary embedding against their formulas on the CPU, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from lctrain.ops import npu_fused
from lctrain.runtime.device import Accelerator
from lctrain.selftest.row import Row, compared, farthest

SECTION = "fused operators"
_EPS, _TOLERANCE = 1e-5, 1e-4

Formula = Callable[..., torch.Tensor]


def fused_rows(device: Accelerator) -> Iterator[Row]:
    """A row for each operator in fp32; none where there are no such operators."""
    if device.type != "npu":
        return
    heads = [(2, 4, 64, 32), (1, 1, 64, 32), (1, 1, 64, 32)]
    cases: dict[str, tuple[Formula, Formula, Sequence[tuple[int, ...]], int]] = {
        "RMSNorm": (lambda x, w: npu_fused.rms_norm(x, w, _EPS), _rms_norm, [(4, 64, 256), (256,)], 2),
        "SwiGLU": (npu_fused.swiglu, lambda gate, up: F.silu(gate) * up, [(4, 64, 256), (4, 64, 256)], 2),
        "rotary embedding": (npu_fused.rotary, _rotary, heads, 1),
    }
    for name, (fused, plain, shapes, trained) in cases.items():
        yield compared(SECTION, name, partial(_error, device, fused, plain, shapes, trained), _TOLERANCE)


def _error(
    device: Accelerator, fused: Formula, plain: Formula, shapes: Sequence[tuple[int, ...]], trained: int
) -> tuple[float, str]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(shape, generator=generator) * 2 - 1 for shape in shapes]
    right = _results(plain, tensors, trained)
    ours = _results(fused, [x.to(device.torch_device) for x in tensors], trained)
    names = ["output", *(f"gradient {number}" for number in range(trained))]
    errors = {n: float((a.cpu() - b).abs().max() / b.abs().max()) for n, a, b in zip(names, ours, right, strict=True)}
    where, error = farthest(errors)
    return error, f"largest in {where}"


def _results(formula: Formula, tensors: Sequence[torch.Tensor], trained: int) -> list[torch.Tensor]:
    """The output, and the gradients of the first `trained` tensors for a weight on each of its numbers."""
    leaves = [x.clone().requires_grad_(i < trained) for i, x in enumerate(tensors)]
    out = formula(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves[:trained], weights)]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, _EPS)


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
