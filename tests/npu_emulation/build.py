"""Builds the emulation: torch_npu in a folder of its own beside the interpreter's packages, and the stand-in libraries.

    python tests/npu_emulation/build.py      # prints the environment to export

Kept under the user's cache and named after the sources, so that a change builds anew and nothing else does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
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


def build() -> Path:
    """The folder of the built emulation, with `site` (Python packages) and `lib`. Raises Unavailable."""
    from filelock import FileLock

    _check()
    folder = _cache() / _key()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _compile(folder / "lib")
            _install(folder / "site")
            for name in ("home/opp", "home/runtime", "home/compiler"):
                (folder / name).mkdir(parents=True)
            (folder / "complete").touch()
    return folder


def variables(folder: Path) -> dict[str, str]:
    """What a process needs to see the emulated cards, two by default."""
    return {
        "EMULATED_NPU_HOME": str(folder),
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "ASCEND_HOME_PATH": str(folder / "home"),
        "ASCEND_OPP_PATH": str(folder / "home" / "opp"),
        "TASK_QUEUE_ENABLE": "0",  # operators run where they are called: the queue's thread knows nothing of Python
        "PYTHONPATH": str(folder / "site"),
    }


def _check() -> None:
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    if torch != VERSION:
        raise Unavailable(f"torch_npu {VERSION} needs torch {VERSION}, and torch {torch} is installed")
    if sys.platform != "linux" or shutil.which("g++") is None:
        raise Unavailable("the stand-in libraries need g++ on Linux")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lctrain-npu-emulation"


def _key() -> str:
    digest = hashlib.sha256(f"{VERSION} {sys.version_info[:2]} {' '.join(_FLAGS)}".encode())
    for path in sorted([*HERE.glob("native/*"), *HERE.glob("site/**/*.*"), Path(__file__)]):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> None:
    folder.mkdir(parents=True)
    empty = folder / "empty.cpp"
    empty.touch()
    for name, sources in _LIBRARIES.items():
        library = folder / f"lib{name}.so"
        files = [str(HERE / "native" / source) for source in sources] or [str(empty)]
        _run(["g++", *_FLAGS, f"-Wl,-soname,{library.name}", "-o", str(library), *files], "compiling")


def _install(folder: Path) -> None:
    shutil.copytree(HERE / "site", folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--target", str(folder), f"torch_npu=={VERSION}"], "installing torch_npu")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise Unavailable(f"{what} failed: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    for name, value in variables(build()).items():
        print(f"export {name}={value}")
