"""Which device a rank gets, and what it is told when there is none."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch

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


def test_only_the_runtime_and_the_npu_kernel_name_device_modules() -> None:
    package = Path(devices.__file__).parents[1]
    kernel = package / "ops" / "attention" / "npu.py"
    assert not re.search(r"torch\.(cuda|npu)\b|\.cuda\(", kernel.read_text(encoding="utf-8"))
    named = re.compile(r"torch\.(cuda|npu)\b|\.cuda\(|torch_npu")
    found = [
        str(path)
        for path in package.rglob("*.py")
        if "runtime" not in path.parts and path != kernel and named.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
