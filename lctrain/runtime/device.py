"""cuda, npu and cpu behind one interface. Nothing outside this package names a device module."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lctrain.config.hardware import hardware_called
from lctrain.config.root import Device
from lctrain.errors import DeviceError
from lctrain.runtime import ascend
from lctrain.runtime.environment import allocator_problem

if TYPE_CHECKING:
    import torch

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


def acts_as(device: torch.device) -> str:
    """The type of device that tensors on `device` stand for: its own, but in a plan the planned device's."""
    return _planned.get() or device.type


def is_planned() -> bool:
    """Whether tensors stand for ones that are not there, and have no values."""
    return _planned.get() is not None


@contextmanager
def planned(device_type: str) -> Iterator[None]:
    """Tensors of any device stand for ones on `device_type`: code that suits a device chooses what suits that one."""
    token = _planned.set(device_type)
    try:
        yield
    finally:
        _planned.reset(token)


@dataclass(frozen=True)
class Accelerator:
    """The device of this rank.

    type: cuda, npu or cpu. index: its number on this machine (0 on cpu).
    """

    type: str
    index: int

    @property
    def torch_device(self) -> torch.device:
        """The torch device tensors of this rank live on."""
        import torch

        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def name(self) -> str:
        """The vendor's name of the device."""
        if self.type == "cpu":
            return f"cpu ({os.cpu_count()} cores)"
        return str(self._module().get_device_name(self.index))

    @property
    def backend(self) -> str:
        """Process-group backends: gloo for host tensors, the vendor's for device tensors."""
        return {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[self.type]

    @property
    def peak_flops(self) -> float | None:
        """Dense 16-bit peak in FLOP/s (conf/hardware/); None when there is no file for the device."""
        hardware = hardware_called(self.name)
        return None if hardware is None else hardware.peak_tflops["fp16"] * 1e12

    def activate(self) -> None:
        """Make this the process's current device."""
        self.recompute_here()
        if self.type == "cpu":
            return
        self._module().set_device(self.index)
        if self.type == "npu" and ascend.soc(self.name).compiles_online:
            # Compiling each operator for each shape takes minutes; the prebuilt ones take any shape.
            self._module().set_compile_mode(jit_compile=False)

    def recompute_here(self) -> None:
        """Recompute what has no tensor on a device on this one.

        torch_npu makes that npu also for jobs on cpu, whose machine may have no card.
        """
        from torch.utils.checkpoint import DefaultDeviceType

        DefaultDeviceType.set_device_type(self.type)

    def synchronize(self) -> None:
        """Wait for queued work."""
        if self.type != "cpu":
            self._module().synchronize()

    def peak_memory_bytes(self) -> int:
        """Most memory held so far: allocated device memory, or on cpu the process's resident set."""
        if self.type != "cpu":
            return int(self._module().max_memory_allocated())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """Let peak_memory_bytes count from now; a process's resident set cannot be."""
        assert self.type != "cpu", "a resident set has no peak to reset"
        self._module().reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Give cached device memory back to the driver, for other processes and other allocators."""
        if self.type != "cpu":
            self._module().empty_cache()

    def total_memory_bytes(self) -> int:
        """Memory of the device; on cpu what the machine has available now."""
        if self.type != "cpu":
            return int(self._module().get_device_properties(self.index).total_memory)
        return host_memory_bytes()

    def free_memory_bytes(self) -> int:
        """Memory that nobody has taken now, on the device or on cpu of the machine."""
        if self.type != "cpu":
            return int(self._module().mem_get_info(self.index)[0])
        return host_memory_bytes()

    def supports_bf16(self) -> bool:
        """Whether bf16 arithmetic exists on the device; what a V100 emulates in fp32 does not count."""
        if self.type == "cpu":
            return True
        if self.type == "npu":
            return ascend.soc(self.name).bf16
        return bool(self._module().is_bf16_supported(including_emulation=False))

    @contextmanager
    def traced(self, folder: Path, rank: int) -> Iterator[None]:
        """Record what runs inside, on the host and on this device.

        `folder` gets rank-N.json, a trace that https://ui.perfetto.dev and chrome://tracing show; on npu the folder
        of torch_npu's profiler, with its tables of computing and communication, which MindStudio Insight shows.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.type == "npu":
            import torch_npu

            kinds = torch_npu.profiler.ProfilerActivity
            ready = torch_npu.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank-{rank}")
            with torch_npu.profiler.profile(activities=[kinds.CPU, kinds.NPU], on_trace_ready=ready):
                yield
                self.synchronize()
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.type == "cuda" else [])]) as p:
            yield
            self.synchronize()
        p.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    def seed(self, value: int) -> None:
        """Seed the host's and the device's generators."""
        import torch

        torch.manual_seed(value)

    def make_deterministic(self) -> None:
        """From now on the same input gives the same bits, or an operation that cannot refuses with RuntimeError.

        To be called before the first kernel and the first collective, which read the variables.
        """
        import torch

        if self.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if self.type == "npu":
            os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.use_deterministic_algorithms(True)

    def _module(self) -> Any:
        """torch.cuda or torch.npu, which have no common type."""
        import torch

        return torch.get_device_module(self.type)


def host_memory_bytes() -> int:
    """Host memory available now."""
    import psutil

    return int(psutil.virtual_memory().available)


def compute_capability(device_type: str) -> tuple[int, int]:
    """(major, minor) of the current device's architecture; (0, 0) where devices have none."""
    import torch

    if device_type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def count(device_type: str) -> int | None:
    """Devices of a type on this machine; None for cpu, where ranks may share cores."""
    if device_type == "cpu":
        return None
    import torch

    _load(device_type)
    return int(torch.get_device_module(device_type).device_count())


def wanted_type(device: Device) -> str:
    """cuda, npu or cpu: what is asked for, or with auto what there is. Opens no device."""
    return _detect() if device is Device.auto else device.name


def choose(device: Device, local_rank: int, local_world_size: int) -> Accelerator:
    """This rank's device.

    Raises DeviceError when the type is absent or cannot train, or there are more ranks than devices.
    """
    device_type = wanted_type(device)
    if device_type == "npu" and (problem := allocator_problem()) is not None:
        raise DeviceError(f"{problem[0]}; {problem[1]}")
    _load(device_type)
    devices = count(device_type)
    if devices == 0:
        raise DeviceError(
            f"device={device.name} but no {device_type} device is visible; use device=cpu, or check "
            "the driver and the visible-devices variable"
        )
    if devices is not None and local_world_size > devices:
        raise DeviceError(
            f"{local_world_size} ranks on this machine but {devices} {device_type} devices; set "
            f"launch.nproc_per_node={devices} or device=cpu"
        )
    return Accelerator(device_type, 0 if devices is None else local_rank)


def _detect() -> str:
    import torch

    if ascend.transferred():  # it lets torch.cuda answer for npu
        return "npu"
    current = torch.accelerator.current_accelerator(check_available=True)
    return current.type if current is not None and current.type in ("cuda", "npu") else "cpu"


def _load(device_type: str) -> None:
    """torch_npu registers the npu device when imported; a CUDA-less torch has no cuda module to offer."""
    import torch

    if device_type == "npu":
        ascend.import_torch_npu(Device.npu)
        module = torch.get_device_module("npu")
        if module.device_count():
            ascend.check_trains(module.get_device_name(0))
    if device_type == "cuda" and ascend.transferred():
        raise DeviceError("device=cuda but transfer_to_npu has put npu in its place; use device=npu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device=cuda but torch sees no CUDA device; use device=cpu, or install a CUDA build of torch")
