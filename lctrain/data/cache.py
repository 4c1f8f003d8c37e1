"""A folder that is either whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def build_once(folder: Path, build: Callable[[Path], None], *, report: Callable[[str], None]) -> bool:
    """Have `build` fill `folder` unless it exists; whether it did.

    One process at a time builds a folder, in a temporary one beside it that is renamed when it is
    whole; the others wait, then find it. What a killed process left is removed by the next one.
    Raises what `build` raises, with nothing left behind, and OSError where the place cannot be written.
    """
    if folder.is_dir():
        return False
    with only_writer(folder, report=report):
        if folder.is_dir():
            return False
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(leftover)
        _build_whole(folder, build)
        return True


@contextmanager
def only_writer(folder: Path, *, report: Callable[[str], None]) -> Iterator[None]:
    """Be the one process that writes `folder`; another one is waited for, and said so."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"data: another process is preparing {folder.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_whole(folder: Path, build: Callable[[Path], None]) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        build(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise
