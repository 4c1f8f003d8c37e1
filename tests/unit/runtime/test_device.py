"""Which device a rank gets, and what it is told when there is none."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import torch
from torch.utils.checkpoint import DefaultDeviceType

from lctrain.config.root import Device
from lctrain.errors import DeviceError
from lctrain.runtime import device as devices
from lctrain.runtime.device import Accelerator, choose


@pytest.fixture
def two_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two NPUs, as far as choosing goes."""
    monkeypatch.setattr(devices, "_load", lambda device_type: None)
    monkeypatch.setattr(devices, "count", lambda device_type: {"npu": 2, "cuda": 0, "cpu": None}[device_type])


@pytest.mark.usefixtures("two_npus")
def test_a_rank_gets_the_device_of_its_number() -> None:
    assert [choose(Device.npu, rank, 2) for rank in (0, 1)] == [Accelerator("npu", 0), Accelerator("npu", 1)]


@pytest.mark.usefixtures("two_npus")
def test_two_allocator_variables_are_refused_before_a_card_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a plan, which sets no environment."""
    for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(DeviceError, match="are both set and torch_npu accepts only one; unset PYTORCH_ALLOC_CONF"):
        choose(Device.npu, 0, 1)


def test_a_job_on_cpu_recomputes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "npu")  # as torch_npu leaves it
    Accelerator("cpu", 0).activate()
    assert DefaultDeviceType.get_device_type() == "cpu"


@pytest.mark.usefixtures("two_npus")
def test_more_ranks_than_devices() -> None:
    with pytest.raises(DeviceError) as caught:
        choose(Device.npu, 0, 3)
    text = str(caught.value)
    assert "3 ranks on this machine but 2 npu devices" in text
    assert "launch.nproc_per_node=2 or device=cpu" in text


@pytest.mark.usefixtures("two_npus")
def test_no_device_of_the_kind() -> None:
    with pytest.raises(DeviceError, match="device=cuda but no cuda device is visible"):
        choose(Device.cuda, 0, 1)


def test_a_device_this_machine_does_not_have_is_never_replaced_by_the_cpu() -> None:
    with pytest.raises(DeviceError, match="device=npu but torch_npu cannot be imported"):
        choose(Device.npu, 0, 1)
    if not torch.accelerator.is_available():
        with pytest.raises(DeviceError, match="device=cuda but torch sees no CUDA device"):
            choose(Device.cuda, 0, 1)
        assert choose(Device.auto, 0, 1).type == "cpu"


def test_auto_takes_an_accelerator_only_of_a_kind_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_load", lambda device_type: None)
    monkeypatch.setattr(devices, "count", lambda device_type: None if device_type == "cpu" else 8)
    for kind, wanted in (("cuda", "cuda"), ("npu", "npu"), ("mps", "cpu"), (None, "cpu")):
        found = None if kind is None else type("Found", (), {"type": kind})
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, f=found: f)
        assert choose(Device.auto, 1, 2).type == wanted


def test_the_cpu() -> None:
    cpu = choose(Device.cpu, 5, 64)  # ranks may share cores
    assert cpu == Accelerator("cpu", 0)
    assert cpu.torch_device == torch.device("cpu")
    assert cpu.backend == "cpu:gloo"
    assert cpu.peak_flops is None
    assert cpu.supports_bf16()
    resident = psutil.Process().memory_info().rss
    assert 0.5 * resident < cpu.peak_memory_bytes() < 64 * resident
    assert 0 < cpu.total_memory_bytes() <= psutil.virtual_memory().total
    cpu.seed(3)
    first = torch.rand(2)
    cpu.seed(3)
    assert torch.equal(torch.rand(2), first)


def test_backends_and_peaks_of_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator("cuda", 1).backend == "cpu:gloo,cuda:nccl"
    assert Accelerator("npu", 1).backend == "cpu:gloo,npu:hccl"
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("Ascend910B3", 295e12), ("Unheard Of", None)):
        monkeypatch.setattr(Accelerator, "name", name)
        assert Accelerator("cuda", 0).peak_flops == peak


class Module:
    """torch.npu as far as an Accelerator asks it; `calls` is what it was asked."""

    def __init__(self, name: str = "Ascend910B3") -> None:
        self.name = name
        self.calls: list[tuple[str, object]] = []

    def __getattr__(self, function: str) -> Any:
        def call(*args: object, **kwargs: object) -> object:
            self.calls.append((function, kwargs or args))
            return {"get_device_name": self.name, "device_count": 2, "mem_get_info": (3, 4)}.get(function)

        return call


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """A torch.npu that is not here."""
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    monkeypatch.setattr(devices.ascend, "import_torch_npu", lambda device: None)
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cpu")  # activating sets it, for later tests too
    return module


def test_the_first_910_is_told_not_to_compile_each_operator(module: Module) -> None:
    Accelerator("npu", 1).activate()
    assert [call for call in module.calls if call[0] != "get_device_name"] == [("set_device", (1,))]
    module.name = "Ascend910A"
    Accelerator("npu", 1).activate()
    assert module.calls[-1] == ("set_compile_mode", {"jit_compile": False})


def test_bf16_by_soc_and_without_what_a_gpu_emulates(module: Module) -> None:
    assert Accelerator("npu", 0).supports_bf16()
    module.name = "Ascend910ProB"
    assert not Accelerator("npu", 0).supports_bf16()
    Accelerator("cuda", 0).supports_bf16()
    assert module.calls[-1] == ("is_bf16_supported", {"including_emulation": False})


def test_memory_is_asked_for_and_given_back(module: Module) -> None:
    assert Accelerator("npu", 1).free_memory_bytes() == 3
    assert module.calls[-1] == ("mem_get_info", (1,))
    Accelerator("npu", 1).empty_cache()
    assert module.calls[-1] == ("empty_cache", ())
    module.calls.clear()
    Accelerator("cpu", 0).empty_cache()
    assert module.calls == []
    assert 0 < Accelerator("cpu", 0).free_memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("kind", "variable", "value"),
    [("npu", "HCCL_DETERMINISTIC", "true"), ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":4096:8")],
)
def test_deterministic(kind: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    Accelerator(kind, 0).make_deterministic()
    assert (os.environ, asked) == ({variable: value}, [True])


def test_an_inference_card_is_refused(module: Module) -> None:
    module.name = "Ascend310P3"
    with pytest.raises(DeviceError, match="Ascend310P3 is an inference card and cannot train"):
        choose(Device.npu, 0, 1)


def test_transfer_to_npu_makes_auto_npu_and_cuda_an_error(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.ascend, "transferred", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose(Device.auto, 1, 2) == Accelerator("npu", 1)
    with pytest.raises(DeviceError, match="transfer_to_npu has put npu in its place; use device=npu"):
        choose(Device.cuda, 0, 1)
