"""Packages that do not fit, CANN that is not there and SoCs that cannot, told apart without torch_npu."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lctrain.config.root import Device
from lctrain.errors import DeviceError
from lctrain.runtime import ascend
from lctrain.runtime.ascend import (
    Packages,
    build_problem,
    check_trains,
    import_problem,
    import_torch,
    import_torch_npu,
    pair_problem,
    read_packages,
    soc,
    transfer_problem,
    transferred,
)

PAIR = Packages("2.13.0+cpu", "2.13.0", "2.13.0")
NO_LIBRARY = ImportError("libhccl.so: cannot open shared object file: No such file or directory")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend that these packages are installed, and that importing them raises."""
    before = {name: module for name, module in sys.modules.items() if name == "torch_npu"}

    def pretend(packages: Packages, error: Exception | None = None) -> None:
        monkeypatch.setattr(ascend, "read_packages", lambda: packages)
        monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
        real = builtins.__import__

        def importing(name: str, *args: Any, **kwargs: Any) -> ModuleType:
            if name not in ("torch", "torch_npu"):
                return real(name, *args, **kwargs)
            if error is None:
                return ModuleType(name)
            monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # as torch_npu does before it fails
            raise error

        monkeypatch.setattr(builtins, "__import__", importing)

    yield pretend
    sys.modules.pop("torch_npu", None)
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("name", "trains", "bf16", "saturates"),
    [
        ("Ascend910", True, False, True),
        ("Ascend910A", True, False, True),
        ("Ascend910B", True, False, True),
        ("Ascend910ProB", True, False, True),
        ("Ascend910PremiumA", True, False, True),
        ("Ascend910B1", True, True, False),
        ("Ascend910B2C", True, True, False),
        ("Ascend910B4-1", True, True, False),
        ("Ascend910_9391", True, True, False),
        ("Ascend950PR_9579", True, True, False),
        ("Ascend310P3", False, False, True),
        ("Ascend310B4", False, False, True),
    ],
)
def test_what_a_soc_can_do(name: str, trains: bool, bf16: bool, saturates: bool) -> None:
    found = soc(name)
    assert (found.trains, found.bf16, found.saturates) == (trains, bf16, saturates)
    assert found.compiles_online == (trains and not bf16)


def test_an_inference_card_cannot_train() -> None:
    check_trains("Ascend910A")
    with pytest.raises(DeviceError, match="Ascend310P3 is an inference card and cannot train; run on an Ascend 910"):
        check_trains("Ascend310P3")


@pytest.mark.parametrize(
    ("torch", "needs", "fits"),
    [
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.0", True),
        ("2.13.1", "2.13.0", False),
        ("2.13.1", "2.13", True),
        ("2.1.0", "2.13", False),
        ("2.12.0", "2.13.0", False),
    ],
)
def test_pairs(torch: str, needs: str, fits: bool) -> None:
    problem = pair_problem(Packages(torch, "2.13.0", needs))
    assert (problem is None) == fits
    if problem is not None:
        what, mend = problem
        assert what == f"torch_npu 2.13.0 needs torch {needs} and torch {torch} is installed"
        assert mend.startswith(
            f"pip install torch_npu=={torch.split('+')[0]}, or pip install torch=={needs} from PyTorch's index"
        )


def test_one_package_alone_is_no_pair() -> None:
    assert pair_problem(Packages("2.13.0")) is None
    assert pair_problem(Packages(None, "2.13.0", "2.13.0")) is None


def test_a_cuda_build_beside_torch_npu() -> None:
    packages = Packages("2.13.0", "2.13.0", "2.13.0", cuda="13.0")
    problem = build_problem(packages, {})
    assert problem is not None
    assert "torch 2.13.0 is a build for CUDA 13.0 and torch_npu is installed beside it" in problem[0]
    assert "pip install torch==2.13.0 from PyTorch's index of CPU builds" in problem[1]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in problem[1]
    assert build_problem(packages, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) is None
    assert build_problem(PAIR, {}) is None
    assert build_problem(Packages("2.13.0", cuda="13.0"), {}) is None


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '13.0'", 'cuda = "13.0"'])
def test_installed_packages_are_read_without_importing_them(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version, more in (
        ("torch", "2.13.0", ""),
        ("torch_npu", "2.12.0.post1", "Requires-Dist: torch==2.12.*\n"),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0+cu130'\n{line}\nhip = None\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert read_packages() == Packages("2.13.0", "2.12.0.post1", "2.12", "13.0")
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")
    (tmp_path / "torch_npu-2.12.0.post1.dist-info" / "METADATA").write_text("Name: torch_npu\nVersion: 2.12.0.post1\n")
    assert read_packages() == Packages("2.13.0", "2.12.0.post1", "2.12", None)
    monkeypatch.setattr(sys, "path", [])
    assert read_packages() == Packages()


def test_this_interpreters_torch_is_found() -> None:
    import torch

    found = read_packages()
    assert found.torch is not None
    assert found.torch == metadata.version("torch")
    assert found.release == torch.__version__.split("+")[0]
    assert found.cuda == torch.version.cuda


def causes(error: Exception) -> list[BaseException]:
    return [RuntimeError("Failed to load the backend extension: torch_npu."), error]


@pytest.mark.parametrize(
    ("error", "why", "mend"),
    [
        (NO_LIBRARY, "libhccl.so of CANN is not found", "source CANN's set_env.sh"),
        (ImportError("libascendcl.so.1: no such file"), "libascendcl.so.1 of CANN", "source CANN's set_env.sh"),
        (OSError("libge_runner.so: cannot be loaded"), "libge_runner.so of CANN", "source CANN's set_env.sh"),
        (ImportError("/x/libtorch_npu.so: undefined symbol: _ZN3c10"), "undefined symbol", "built for this torch"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), "it needs yaml", "pip install yaml"),
        (RuntimeError("driver says no\nmore"), "driver says no", "check that torch_npu matches torch"),
        (RuntimeError(""), "no reason given", "check that torch_npu matches torch"),
    ],
)
def test_why_an_import_failed(error: Exception, why: str, mend: str) -> None:
    found = import_problem(causes(error))
    assert why in found[0]
    assert "\n" not in found[0]
    assert mend in found[1]


def test_torch_that_brings_torch_npu_without_cann(installed: Any) -> None:
    error = RuntimeError("Failed to load the backend extension: torch_npu.")
    error.__cause__ = NO_LIBRARY
    installed(PAIR, error)
    for device, otherwise in ((Device.npu, "use device=cpu"), (Device.auto, "set TORCH_DEVICE_BACKEND_AUTOLOAD=0")):
        with pytest.raises(DeviceError) as caught:
            import_torch(device, {})
        text = str(caught.value)
        assert text.startswith(
            f"device={device.name} but torch_npu cannot be imported (libhccl.so of CANN is not found)"
        )
        assert "source CANN's set_env.sh" in text
        assert otherwise in text
        assert caught.value.exit_code == 2


def test_torch_that_fails_by_itself_is_not_explained_away(installed: Any) -> None:
    installed(Packages("2.13.0"), OSError("libtorch_cpu.so: file too short"))
    with pytest.raises(OSError, match="libtorch_cpu"):
        import_torch(Device.auto, {})
    installed(PAIR, OSError("libtorch_cpu.so: file too short"))
    with pytest.raises(OSError, match="libtorch_cpu"):
        import_torch(Device.cpu, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        (Packages("2.13.0", "2.12.0", "2.12.0"), "device=npu: torch_npu 2.12.0 needs torch 2.12.0"),
        (Packages("2.13.0", "2.13.0", "2.13.0", "13.0"), "device=npu: torch 2.13.0 is a build for CUDA 13.0"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_imported(installed: Any, packages: Packages, said: str) -> None:
    installed(packages, AssertionError("imported"))
    with pytest.raises(DeviceError) as caught:
        import_torch(Device.npu, {})
    assert str(caught.value).startswith(said)


def test_a_run_without_torch_npu_does_not_care_what_it_would_need(installed: Any) -> None:
    installed(Packages("2.13.0", "2.12.0", "2.12.0", "13.0"))
    import_torch(Device.cuda, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@pytest.mark.parametrize(("device", "hidden"), [(Device.cpu, True), (Device.auto, True), (Device.npu, False)])
def test_who_turns_torch_npu_off_gets_no_library_that_imports_it(installed: Any, device: Device, hidden: bool) -> None:
    installed(PAIR)
    import_torch(device, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert (sys.modules.get("torch_npu", "none") is None) == hidden
    assert not hidden or find_spec("torch_npu") is None


def test_torch_npu_itself(installed: Any) -> None:
    installed(Packages("2.13.0+cpu"), AssertionError("imported"))
    with pytest.raises(DeviceError) as caught:
        import_torch_npu(Device.npu)
    assert (
        "device=npu but torch_npu cannot be imported (it is not installed); pip install torch_npu==2.13.0 and"
        in str(caught.value)
    )
    installed(Packages("2.13.0", "2.12.0", "2.12.0"), AssertionError("imported"))
    with pytest.raises(DeviceError, match=r"torch_npu 2\.12\.0 needs torch 2\.12\.0 and torch 2\.13\.0 is installed"):
        import_torch_npu(Device.npu)
    installed(PAIR, NO_LIBRARY)
    with pytest.raises(DeviceError, match=r"libhccl\.so of CANN is not found"):
        import_torch_npu(Device.npu)
    installed(PAIR)
    import_torch_npu(Device.npu)


def test_libraries_of_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"libascendcl.so"}
    monkeypatch.setattr(ascend, "_loads", there.__contains__)
    assert ascend.missing_library() == "libhccl.so"
    there.add("libhccl.so")
    assert ascend.missing_library() is None
    there.clear()
    assert ascend.missing_library() == "libascendcl.so"
    monkeypatch.undo()
    assert not ascend._loads("libthat_is_nowhere.so")
    assert ascend._loads("libc.so.6")


def test_transfer_to_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not transferred()
    assert transfer_problem() is None
    monkeypatch.setitem(sys.modules, "torch_npu.contrib.transfer_to_npu", ModuleType("transfer_to_npu"))
    assert transferred()
    assert transfer_problem() == transfer_problem(active=True) is not None
    assert transfer_problem(active=False) is None
