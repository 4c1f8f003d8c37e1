"""Ascend's fused RMSNorm, SwiGLU and rotary embedding through torch_npu, with gradients.

The ops take one dtype and do not promote; operands are brought to the common one first, which is what the plain
formulas give. Legend: B batch, S sequence, H heads, D head dim, C width, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_HEAD_DIM, MAX_HEADS = 896, 1000
"""npu_rotary_mul takes less of both (torch_npu 2.13's documentation)."""


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension C (Zhang and Sennrich, arXiv:1910.07467)."""
    assert x.shape[-1:] == weight_C.shape, (x.shape, weight_C.shape)
    x, weight_C = _one_dtype(x, weight_C)
    return _ops().npu_rms_norm(x, weight_C, eps)[0]


def swiglu(gate_BSI: torch.Tensor, up_BSI: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer, arXiv:2002.05202)."""
    assert gate_BSI.shape == up_BSI.shape, (gate_BSI.shape, up_BSI.shape)
    return _ops().npu_swiglu(torch.cat(_one_dtype(gate_BSI, up_BSI), dim=-1), dim=-1)


def rotary(x_BHSD: torch.Tensor, cos_BD: torch.Tensor, sin_BD: torch.Tensor) -> torch.Tensor:
    """x * cos + (-second half, first half of x) * sin (Su et al., arXiv:2104.09864).

    x: [B, H, S, D] or [B, S, H, D]; cos and sin: with 1 in place of H, and of B where all sequences share positions.
    """
    assert x_BHSD.dim() == cos_BD.dim() == 4, (x_BHSD.shape, cos_BD.shape)
    assert x_BHSD.shape[-1] == cos_BD.shape[-1] == sin_BD.shape[-1], (x_BHSD.shape, cos_BD.shape, sin_BD.shape)
    return _ops().npu_rotary_mul(*_one_dtype(x_BHSD, cos_BD, sin_BD))


def _one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _ops() -> Any:
    """The namespace torch_npu registers."""
    import torch_npu  # noqa: F401

    return torch.ops.npu
