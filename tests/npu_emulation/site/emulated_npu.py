"""torch_npu's aten operators computed on the CPU, over the bytes of the emulated cards.

"Device" memory is host memory, so every npu tensor has a CPU alias. For each operator torch_npu registers, a function
takes its place that swaps tensors for their aliases, lets the CPU compute and gives results back as npu tensors.
torch_npu's own operators (torch.ops.npu) are left alone: those run its C++ and call the emulated libraries.

`install` is an entry point of torch.backends, so `import torch` calls it, as it calls torch_npu's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

NPU, CPU = "npu", torch.device("cpu")

# Views and allocations, which torch_npu does right on host memory; a CPU result could not be given back.
_OWN = {
    "_conj",
    "_has_compatible_shallow_copy_type",
    "_neg_view",
    "_pin_memory",
    "_reshape_alias",
    "alias",
    "as_strided",
    "detach",
    "empty.memory_format",
    "empty_strided",
    "is_pinned",
    "native_dropout_backward_npu",
    "pin_memory",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "storage_offset",
    "unfold",
    "unsafe_chunk",
    "view",
    "view_as_complex",
    "view_as_real",
}
_libraries: list[torch.library.Library] = []
_saturated = False


def install() -> None:
    """Replace the operators of this process, if the emulated libraries are what torch_npu loaded."""
    if "EMULATED_NPU_HOME" not in os.environ or _libraries:
        return
    import torch_npu  # noqa: F401

    print(f"EMULATED npu: cards are host memory of process {os.getpid()}", file=sys.stderr)
    aten = torch.library.Library("aten", "IMPL")
    _libraries.append(aten)
    for registered in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, name = registered.split("::")
        base, _, overload = name.partition(".")
        if namespace == "aten" and name not in _OWN and hasattr(torch.ops.aten, base):
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name, _on_cpu(operator, name), "PrivateUse1", allow_override=True)
    if saturates():
        own = torch.library.Library("npu", "IMPL")
        _libraries.append(own)
        own.impl("npu_get_float_status", _get_float_status, "PrivateUse1", allow_override=True)
        own.impl("npu_clear_float_status", _clear_float_status, "PrivateUse1", allow_override=True)


def saturates() -> bool:
    """910A-class chips have no infinity in fp16: they give the largest number and set a flag."""
    soc = os.environ.get("EMULATED_NPU_SOC", "Ascend910B3")
    return re.fullmatch("Ascend910(A|B|ProA|ProB|PremiumA)?", soc) is not None


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same bytes. It owns nothing: `tensor` must outlive it."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    found = torch.empty(0, dtype=tensor.dtype)
    found.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        found = found.conj()
    return found._neg_view() if tensor.is_neg() else found


class _Call:
    """One call's arguments on the CPU, and what it takes to bring its results back."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_cpu(self, value: Any) -> Any:
        """Tensors to aliases, devices and generators to the CPU's; containers item by item."""
        if isinstance(value, torch.Tensor):
            if value.device.type != NPU:
                return value
            self.device = value.device
            self.aliases.append((alias(value), value))
            return self.aliases[-1][0]
        if isinstance(value, torch.device):
            if value.type != NPU:
                return value
            self.device = self.device or torch.device(NPU, torch.npu.current_device())
            return CPU
        if isinstance(value, torch.Generator):
            return None if value.device.type == NPU else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_cpu(item) for item in value)
        return value

    def to_npu(self, result: Any) -> Any:
        """An argument itself, a view of one, or new memory on the card."""
        if not isinstance(result, torch.Tensor) or self.device is None:
            return result
        for on_cpu, given in self.aliases:
            if result is on_cpu:
                return given
        if result.numel():
            where = result.untyped_storage().data_ptr()
            for on_cpu, given in self.aliases:
                if on_cpu.numel() and on_cpu.untyped_storage().data_ptr() == where:
                    return torch.as_strided(given, result.size(), result.stride(), result.storage_offset())
        made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=self.device)
        if made.numel():
            alias(made).copy_(result)
        return made

    def saturate(self, result: Any) -> None:
        """Numbers instead of fp16 infinities, and the flag; a view is no result, and may show memory nobody wrote."""
        global _saturated
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.float16 or not result.numel():
            return
        where = result.untyped_storage().data_ptr()
        shared = [on_cpu for on_cpu, _ in self.aliases if on_cpu.untyped_storage().data_ptr() == where]
        if (not shared or any(result is on_cpu for on_cpu in shared)) and bool(result.isinf().any()):
            limit = torch.finfo(torch.float16).max
            result.clamp_(-limit, limit)
            _saturated = True


def _on_cpu(operator: Any, name: str) -> Callable[..., Any]:
    takes_device = any(argument.name == "device" for argument in operator._schema.arguments)
    compute = _matmul_backward if name == "matmul_backward" else operator

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _Call()
        target = kwargs.get("device")
        leaves = target is not None and torch.device(target).type != NPU
        if name == "_to_copy" and kwargs.get("dtype") is torch.float64 and target is None:
            kwargs["dtype"] = torch.float32  # what torch_npu does on chips without fp64
        here = call.to_cpu(args)
        named = {key: call.to_cpu(value) for key, value in kwargs.items() if key != "pin_memory"}
        if leaves:
            call.device = None
        elif call.device is None and takes_device and target is None:
            call.device = torch.device(NPU, torch.npu.current_device())
        result = compute(*here, **named)
        if saturates() and "empty" not in name:
            tree_map(call.saturate, result)
        return tree_map(call.to_npu, result)

    return run


def _matmul_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of matmul with its broadcasting, which the CPU computes through other operators."""
    rows = a[None] if a.dim() == 1 else a
    columns = b[:, None] if b.dim() == 1 else b
    if b.dim() == 1:
        grad = grad[..., None]
    if a.dim() == 1:
        grad = grad.unsqueeze(-2)
    to_a = torch.matmul(grad, columns.mT).sum_to_size(rows.shape).reshape(a.shape) if wanted[0] else None
    if not wanted[1]:
        return to_a, None
    if rows.dim() > 2 and columns.dim() == 2:  # one product over all rows, as a linear layer's weight needs
        to_b = rows.reshape(-1, rows.shape[-1]).mT @ grad.reshape(-1, grad.shape[-1])
    else:
        to_b = torch.matmul(rows.mT, grad)
    return to_a, to_b.sum_to_size(columns.shape).reshape(b.shape)


def _get_float_status(status: torch.Tensor) -> torch.Tensor:
    alias(status).fill_(float(_saturated))
    return status


def _clear_float_status(status: torch.Tensor) -> torch.Tensor:
    global _saturated
    _saturated = False
    alias(status).zero_()
    return status
