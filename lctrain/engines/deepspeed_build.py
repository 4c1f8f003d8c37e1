"""The one operator that DeepSpeed compiles for jobs on CPU: messages of a machine's ranks through shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def build_for_cpu() -> None:
    """Compile it, one process of a machine at a time, unless it is there.

    torch guards a build by a file that a killed process leaves behind, and everybody after it would wait for ever.
    """
    import deepspeed
    from filelock import FileLock
    from torch.utils.cpp_extension import _get_build_directory

    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return  # DeepSpeed goes without, then
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with FileLock(folder.with_name(f"{folder.name}.lctrain")):  # which the system lets go of with its process
        drop_stale_lock(folder / "lock")
        builder.load()


def drop_stale_lock(lock: Path) -> None:
    """Remove torch's lock file unless a process has it open, as one that builds does."""
    if lock.exists() and not _is_open(lock):
        lock.unlink(missing_ok=True)


def _is_open(path: Path) -> bool:
    import psutil

    wanted = str(path.resolve())
    return any(wanted in _files_of(process) for process in psutil.process_iter())


def _files_of(process: psutil.Process) -> list[str]:
    import psutil

    try:
        return [file.path for file in process.open_files()]
    except psutil.Error:  # it has ended, or is another user's
        return []
