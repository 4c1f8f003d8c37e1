"""Every attention kernel that this device has, against the equations on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch

from lctrain.config.model import AttentionKernel
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Kernel
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.ops.attention.select import select_kernel, why_not
from lctrain.ops.npu_schemas import differences
from lctrain.runtime.device import Accelerator
from lctrain.selftest.row import Row, compared, farthest

SECTION = "attention kernels"
_HEADS, _KV_HEADS, _DIM = 2, 1, 64
_PACKS = {
    # Longer than npu_fusion_attention's compressed mask, whose causal mode must hold beyond it.
    "one document": Documents((0, 2304)),
    "a pack": Documents((0, 5, 133, 134, 300, 384)),
}
# Rounding of the inputs' dtype, some times over; measured on CPUs and emulated cards at a tenth of these.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def kernel_rows(device: Accelerator) -> Iterator[Row]:
    """A row for each kernel, dtype and kind of pack; the reason for one that does not run here."""
    if device.type == "npu":
        found = differences()
        yield Row(SECTION, "torch_npu's operators", "; ".join(found) or "as recorded", float(len(found)), 0.0)
    dtypes = {d: t for d, t in _TOLERANCES.items() if d is not torch.bfloat16 or device.supports_bf16()}
    for name in AttentionKernel:
        if name is AttentionKernel.auto:
            continue
        reasons = {dtype: why_not(name, device.type, dtype) for dtype in dtypes}
        if reason := next(iter(reasons.values())) if all(reasons.values()) else None:
            yield Row(SECTION, name.name, f"not here: {reason}")
            continue
        for dtype, tolerance in dtypes.items():
            title = f"{name.name}, {str(dtype).removeprefix('torch.')}"
            if reasons[dtype]:
                yield Row(SECTION, title, f"not here: {reasons[dtype]}")
                continue
            kernel = select_kernel(name, device.type, dtype)
            if device.type != "cpu" and dtype is torch.float32:
                tolerance = 1e-4  # a chip's exponentials are not the host's
            for pack, documents in _PACKS.items():
                measure = partial(_error, kernel, device, dtype, documents)
                yield compared(SECTION, f"{title}, {pack}", measure, tolerance)


def _error(kernel: Kernel, device: Accelerator, dtype: torch.dtype, documents: Documents) -> tuple[float, str]:
    """(largest difference over the largest value, where it is) of output, log-sum-exp and gradients."""
    right = _right(dtype, documents)
    ours = _results(kernel, [x.to(device.torch_device) for x in _inputs(dtype, documents)], documents)
    errors = {
        name: float((got.cpu().float() - right[name]).abs().max() / right[name].abs().max())
        for name, got in ours.items()
    }
    where, error = farthest(errors)
    return error, f"largest in {where}"


def _inputs(dtype: torch.dtype, documents: Documents) -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(documents.total, heads, _DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@lru_cache
def _right(dtype: torch.dtype, documents: Documents) -> dict[str, torch.Tensor]:
    """What the equations give for the rounded inputs, in fp32."""
    return _results(ReferenceKernel(), [x.float() for x in _inputs(dtype, documents)], documents)


def _results(kernel: Kernel, tensors: list[torch.Tensor], documents: Documents) -> dict[str, torch.Tensor]:
    q, k, v, grad = tensors
    out, lse = kernel.forward(q, k, v, documents, scale=_DIM**-0.5)
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, documents, scale=_DIM**-0.5)
    return {"output": out, "log-sum-exp": lse, "dq": dq, "dk": dk, "dv": dv}
