"""Which attention kernel runs: the one asked for, or the fastest that can."""

from __future__ import annotations

import torch

from lctrain.config.model import AttentionKernel
from lctrain.errors import ConfigError
from lctrain.ops.attention.flash import FlashKernel
from lctrain.ops.attention.flash3 import Flash3Kernel
from lctrain.ops.attention.flex import FlexKernel
from lctrain.ops.attention.interface import Kernel
from lctrain.ops.attention.npu import NpuKernel
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.ops.attention.sdpa import SdpaKernel

_KERNELS: dict[AttentionKernel, type[Kernel]] = {
    AttentionKernel.flash3: Flash3Kernel,
    AttentionKernel.flash: FlashKernel,
    AttentionKernel.npu: NpuKernel,
    AttentionKernel.sdpa: SdpaKernel,
    AttentionKernel.flex: FlexKernel,
    AttentionKernel.reference: ReferenceKernel,
}
_AUTO = (
    AttentionKernel.flash3,
    AttentionKernel.flash,
    AttentionKernel.npu,
    AttentionKernel.sdpa,
    AttentionKernel.reference,
)
"""Fastest first: the order in which `auto` asks them."""


def select_kernel(name: AttentionKernel, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel to use for tensors of `dtype` on `device_type`.

    Raises ConfigError when a kernel asked for by name cannot run there.
    """
    if name is AttentionKernel.auto:
        kernels = [_KERNELS[kind]() for kind in _AUTO]
        return next(kernel for kernel in kernels if kernel.available(device_type, dtype) is None)
    reason = why_not(name, device_type, dtype)
    if reason is not None:
        raise ConfigError(
            f"model.attention={name.name} cannot run: {reason}; "
            "use model.attention=auto for the fastest kernel that can"
        )
    return _KERNELS[name]()


def why_not(name: AttentionKernel, device_type: str, dtype: torch.dtype) -> str | None:
    """Why the kernel of that name cannot run on tensors of `dtype` on `device_type`; None when it can."""
    return _KERNELS[name]().available(device_type, dtype)
