"""Builds the emulation: torch_npu in a folder of its own beside the interpreter's packages, and the stand-in libraries.

    python tests/npu_emulation/build.py      # prints the environment to export

Kept under the user's cache and named after what they are made from, so that a change builds anew and nothing else does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSION = "2.13.0"
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-shared", "-fPIC"]
_LIBRARIES = {
    "ascendcl": ["runtime.cpp"],
    "acl_op_compiler": ["compiler.cpp"],
    "hccl": ["hccl.cpp"],
    "opapi": ["attention.cpp", "operators.cpp"],
    # Linked against, never called.
    "ge_runner": [],
    "graph": [],
    "acl_tdt_channel": [],
}
_LIMIT_S = 300


class Unavailable(Exception):
    """Why there can be no emulation on this machine."""


@dataclass(frozen=True)
class Built:
    """packages: the folder with torch_npu. home: the folder with the stand-in libraries in `lib`."""

    packages: Path
    home: Path

    def variables(self) -> dict[str, str]:
        """What a process needs to see the emulated cards, two by default."""
        return {
            "EMULATED_NPU_HOME": str(self.home),
            "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", self.home / "lib"),
            "ASCEND_HOME_PATH": str(self.home),
            "ASCEND_OPP_PATH": str(self.home / "opp"),
            "TASK_QUEUE_ENABLE": "0",  # operators run where they are called: the queue's thread knows nothing of Python
            "PYTHONPATH": f"{HERE / 'site'}{os.pathsep}{self.packages}",
        }


def build() -> Built:
    """Both folders, made where they are not there yet. Raises Unavailable."""
    _check()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lctrain-npu-emulation"
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return Built(
        packages=_once(cache / f"torch_npu-{VERSION}-{tag}", _install),
        home=_once(cache / f"libraries-{_digest()}", _compile),
    )


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by one process while others wait, and anew when it was left half made."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "complete").touch()
    return folder


def _before(variable: str, folder: Path) -> str:
    """A path variable's value with `folder` before what is there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])


def _check() -> None:
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    if torch != VERSION:
        raise Unavailable(f"torch_npu {VERSION} needs torch {VERSION}, and torch {torch} is installed")
    if sys.platform != "linux" or shutil.which("g++") is None:
        raise Unavailable("the stand-in libraries need g++ on Linux")


def _digest() -> str:
    """Of everything the libraries are made from."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    # A cache may be another machine's.
    digest.update(
        subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, check=True).stdout
    )
    for path in [*sorted((HERE / "native").iterdir()), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(home: Path) -> None:
    for name in ("lib", "opp", "runtime", "compiler"):
        (home / name).mkdir()
    empty = home / "lib" / "empty.cpp"
    empty.touch()
    for name, sources in _LIBRARIES.items():
        library = home / "lib" / f"lib{name}.so"
        files = [str(HERE / "native" / source) for source in sources] or [str(empty)]
        _run(["g++", *_FLAGS, f"-Wl,-soname,{library.name}", "-o", str(library), *files], "compiling")


def _install(packages: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--target", str(packages), f"torch_npu=={VERSION}"], "installing torch_npu")


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what} took more than {_LIMIT_S} s") from None
    if done.returncode:
        raise Unavailable(f"{what} failed: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    for name, value in build().variables().items():
        print(f"export {name}={value}")
