"""Memory shared with the decoding processes, used again as soon as nothing refers to the batch in it."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class Slots:
    """Places for batches of `size` bytes. Not under /dev/shm, which containers keep small.

    A place is an anonymous file; other processes of this user map it by its path. Pages are touched for the first
    time once a place and not once a batch, which would cost a twentieth of the time that decoding takes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._maps: dict[str, mmap.mmap] = {}
        self._files: list[int] = []
        self._free: list[str] = []

    def take(self) -> str:
        """The path of a place that nothing uses."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new()

    def tensor(self, path: str) -> torch.Tensor:
        """What a place holds, [size] uint8. When this tensor and all its views are gone, the place is free again."""
        import torch

        array = np.frombuffer(self._maps[path], np.uint8)
        # torch holds this array for as long as the storage lives, whatever views there are.
        weakref.finalize(array, self._free.append, path).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Give the files back; tensors keep what they hold."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _new(self) -> str:
        file = os.memfd_create("images")
        os.ftruncate(file, self._size)
        self._files.append(file)
        path = f"/proc/{os.getpid()}/fd/{file}"
        self._maps[path] = mmap.mmap(file, self._size)
        return path


class MappedSlots:
    """In a decoding process: places of the rank, each mapped once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(self, path: str) -> torch.Tensor:
        """The place at `path`, [size] uint8."""
        import torch

        if path not in self._tensors:
            with open(path, "r+b") as file:
                self._tensors[path] = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))
        return self._tensors[path]
