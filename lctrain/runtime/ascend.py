"""Ascend: which packages are installed and fit together, and what a SoC can do. Nothing here opens a device."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lctrain.config.root import Device
from lctrain.errors import DeviceError

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SET_ENV = "source CANN's set_env.sh (usually /usr/local/Ascend/ascend-toolkit/set_env.sh) in this shell"
WITHOUT_NPU = f"set {AUTOLOAD}=0 to run on cuda or cpu without it"
_CPU_BUILD = "from PyTorch's index of CPU builds"
_TRANSFER = "torch_npu.contrib.transfer_to_npu"


@dataclass(frozen=True)
class Packages:
    """Installed versions, None where there is none.

    needs: the release of torch that torch_npu asks for (2.13.0, or 2.13 for any of them). cuda: the CUDA that torch
    was built for; None is a build without.
    """

    torch: str | None = None
    torch_npu: str | None = None
    needs: str | None = None
    cuda: str | None = None

    @property
    def release(self) -> str:
        """2.13.0 of torch 2.13.0+cpu or 2.13.0rc1."""
        found = re.match(r"\d+(\.\d+)*", self.torch or "")
        assert found is not None, self.torch
        return found[0]


@dataclass(frozen=True)
class Soc:
    """What a SoC can do.

    saturates: an fp16 overflow gives the largest number instead of infinity. compiles_online: torch_npu compiles each
    operator for each shape unless told otherwise.
    """

    trains: bool = True
    bf16: bool = True
    saturates: bool = False
    compiles_online: bool = False


def soc(name: str) -> Soc:
    """The SoC that calls itself `name`, e.g. Ascend910B3: 310 is inference only, the first 910 knows fp16 only.

    The first generation is Ascend910, 910A, 910B, 910ProA, 910ProB and 910PremiumA; a digit after the B is the second.
    """
    if name.startswith("Ascend310"):
        return Soc(trains=False, bf16=False, saturates=True)
    if re.fullmatch(r"Ascend910(A|B|ProA|ProB|PremiumA)?", name):
        return Soc(bf16=False, saturates=True, compiles_online=True)
    return Soc()


def check_trains(name: str) -> None:
    """Raise DeviceError for a SoC that is for inference only."""
    if not soc(name).trains:
        raise DeviceError(
            f"device=npu but {name} is an inference card and cannot train; run on an Ascend 910 or a later training "
            "card, or use device=cpu"
        )


def read_packages() -> Packages:
    """What pip installed, read without importing any of it: importing may end the process."""
    torch, torch_npu = _version("torch"), _version("torch_npu")
    needs = None
    if torch_npu is not None:
        asked = (re.match(r"torch\s*\(?==\s*([\d.]*\d)", line) for line in metadata.requires("torch_npu") or ())
        exact = next((found[1] for found in asked if found), None)
        needs = exact or ".".join(torch_npu.split(".")[:2])
    return Packages(torch, torch_npu, needs, _cuda_of_torch() if torch is not None else None)


def pair_problem(packages: Packages) -> tuple[str, str] | None:
    """(what is wrong, what mends it) when torch_npu was built for another torch."""
    if packages.torch is None or packages.torch_npu is None:
        return None
    assert packages.needs is not None
    if f"{packages.release}.".startswith(f"{packages.needs}."):
        return None
    return (
        f"torch_npu {packages.torch_npu} needs torch {packages.needs} and torch {packages.torch} is installed",
        f"pip install torch_npu=={packages.release}, or pip install torch=={packages.needs} {_CPU_BUILD}",
    )


def build_problem(packages: Packages, env: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """(what is wrong, what mends it) when importing torch brings two accelerators together, which can abort."""
    if packages.torch is None or packages.torch_npu is None or packages.cuda is None or not autoloads(env):
        return None
    return (
        f"torch {packages.torch} is a build for CUDA {packages.cuda} and torch_npu is installed beside it; importing "
        "torch imports torch_npu, which accepts no other accelerator",
        f"pip install torch=={packages.release} {_CPU_BUILD} for NPUs, or {WITHOUT_NPU}",
    )


def autoloads(env: Mapping[str, str] = os.environ) -> bool:
    """Whether importing torch imports the accelerator packages that are installed."""
    return env.get(AUTOLOAD, "1") == "1"


def import_torch(device: Device, env: Mapping[str, str] = os.environ) -> None:
    """Import torch, and with it the torch_npu that is installed.

    Raises DeviceError with the mend where the two do not fit, or CANN's libraries are not found.
    """
    packages = read_packages()
    brings = packages.torch_npu is not None and autoloads(env)  # asked first: torch_npu changes the variable
    if packages.torch_npu is not None and not brings and device is not Device.npu:
        # Whoever turned it off means it: transformers and accelerate import it where they find it.
        sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]
    if brings or (packages.torch_npu is not None and device is Device.npu):
        problem = pair_problem(packages) or build_problem(packages, env)
        if problem is not None:
            raise DeviceError(f"device={device.name}: {problem[0]}; {problem[1]}")
    try:
        import torch  # noqa: F401
    except Exception as error:
        if not brings:
            raise
        raise import_refusal(error, device) from error


def failed_autoload(error: RuntimeError) -> DeviceError | None:
    """The message for a torch that was imported without import_torch and could not bring torch_npu along.

    None for any other error: torch's own says which package it is.
    """
    return import_refusal(error, Device.auto) if "backend extension: torch_npu" in str(error) else None


def import_torch_npu(device: Device) -> None:
    """Import torch_npu, which registers npu with torch. Raises DeviceError."""
    packages = read_packages()
    if packages.torch_npu is None:
        raise DeviceError(
            f"device={device.name} but torch_npu cannot be imported (it is not installed); pip install "
            f"torch_npu=={packages.release} and {SET_ENV}, or use device=cpu"
        )
    problem = pair_problem(packages)
    if problem is not None:
        raise DeviceError(f"device={device.name}: {problem[0]}; {problem[1]}")
    try:
        import torch_npu  # noqa: F401
    except Exception as error:
        raise import_refusal(error, device) from error


def import_refusal(error: BaseException, device: Device) -> DeviceError:
    """The one message for a torch_npu that does not import, whatever text the loader chose."""
    why, mend = import_problem(list(_causes(error)))
    otherwise = "use device=cpu" if device is Device.npu else WITHOUT_NPU
    return DeviceError(f"device={device.name} but torch_npu cannot be imported ({why}); {mend}, or {otherwise}")


def import_problem(causes: list[BaseException]) -> tuple[str, str]:
    """(what went wrong, what mends it), of the errors that importing torch_npu raised, the outermost first."""
    for error in causes:
        text = str(error)
        if isinstance(error, ModuleNotFoundError) and error.name != "torch_npu":
            return f"it needs {error.name}, which is not installed", f"pip install {error.name}"
        if isinstance(error, ImportError) and "undefined symbol" in text:
            return _line(text), "install the torch_npu that was built for this torch and this CANN"
        library = re.search(r"\blib[\w+-]+\.so[\w.]*", text)
        if isinstance(error, ImportError | OSError) and library:
            return f"{library[0]} of CANN is not found", SET_ENV
    return _line(str(causes[-1])), f"check that torch_npu matches torch and {SET_ENV}"


def missing_library() -> str | None:
    """The first of CANN's libraries that the loader does not find; None when all are there."""
    return next((name for name in ("libascendcl.so", "libhccl.so") if not _loads(name)), None)


def transferred() -> bool:
    """Whether transfer_to_npu has redirected torch.cuda to npu in this process."""
    return _TRANSFER in sys.modules


def transfer_problem(*, active: bool | None = None) -> tuple[str, str] | None:
    """(what is wrong, what mends it) when transfer_to_npu is active: here, or as another process found out."""
    if not (transferred() if active is None else active):
        return None
    return (
        "transfer_to_npu has been imported: torch.cuda now answers for npu in every library, also where its answer "
        "chooses CUDA's kernels",
        "remove that import, which device=npu does not need",
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it was raised from."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """torch/version.py has a line such as cuda: Optional[str] = '13.0'; the package's version may be silent."""
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    if not path.is_file():
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return found[1] if found else None
