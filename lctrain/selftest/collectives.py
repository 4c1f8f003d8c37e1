"""The messages that layouts send, on whole numbers, whose sums are exact; and how fast the largest go."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from lctrain.runtime.device import Accelerator
from lctrain.selftest.row import Row, compared

SECTION = "collectives"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
_MIB, _REPEATS = 32, 3

Made = Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def collective_rows(device: Accelerator) -> Iterator[Row]:
    """A row for each collective and dtype, and bandwidths. A collective over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtypes = [d for d in _DTYPES if d is not torch.bfloat16 or device.supports_bf16()]
    checks: dict[str, Made] = {
        "all-reduce": lambda dtype: _all_reduce(device, dtype, rank, size),
        "all-gather": lambda dtype: _all_gather(device, dtype, rank, size),
        "reduce-scatter": lambda dtype: _reduce_scatter(device, dtype, rank, size),
        "all-to-all, uneven": lambda dtype: _all_to_all(device, dtype, rank, size),
        "ring of sends": lambda dtype: _ring(device, dtype, rank, size),
    }
    with warnings.catch_warnings():
        # Their successors do not exist in the oldest torch this package takes.
        warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
        for name, make in checks.items():
            for dtype in dtypes:
                title = f"{name}, {str(dtype).removeprefix('torch.')}"
                yield compared(SECTION, title, partial(_error, make, dtype, size), 0.0)
        yield from _bandwidths(device, size)


def _error(make: Made, dtype: torch.dtype, size: int) -> tuple[float, str]:
    got, right = make(dtype)
    return float((got.cpu().double() - right.double()).abs().max()), f"{size} ranks"


def _ones(device: Accelerator, dtype: torch.dtype, value: int, count: int = 6) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device=device.torch_device)


def _all_reduce(device: Accelerator, dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = _ones(device, dtype, rank + 1)
    dist.all_reduce(x)
    return x, torch.full((6,), size * (size + 1) // 2)


def _all_gather(device: Accelerator, dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = _ones(device, dtype, -1, 6 * size)
    dist.all_gather_into_tensor(out, _ones(device, dtype, rank))
    return out, torch.arange(size).repeat_interleave(6)


def _reduce_scatter(device: Accelerator, dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.arange(size, device=device.torch_device).repeat_interleave(6).to(dtype)
    out = _ones(device, dtype, -1)
    dist.reduce_scatter_tensor(out, whole)
    return out, torch.full((6,), rank * size)


def _all_to_all(device: Accelerator, dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank r sends peer p p + 1 copies of r, so it receives r + 1 of every rank."""
    sends, receives = [peer + 1 for peer in range(size)], [rank + 1] * size
    out = _ones(device, dtype, -1, sum(receives))
    dist.all_to_all_single(out, _ones(device, dtype, rank, sum(sends)), receives, sends)
    return out, torch.arange(size).repeat_interleave(rank + 1)


def _ring(device: Accelerator, dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out, own = _ones(device, dtype, -1), _ones(device, dtype, rank)
    if size == 1:
        return own, torch.full((6,), rank)
    to, source = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, out, source)]):
        work.wait()
    return out, torch.full((6,), source)


def _bandwidths(device: Accelerator, size: int) -> Iterator[Row]:
    """Bytes of the message over seconds, the best of a few."""
    count = _MIB * 2**20 // 4 // size * size
    x, parts = _ones(device, torch.float32, 1, count), _ones(device, torch.float32, 1, count // size)
    runs: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(x),
        "all-gather": lambda: dist.all_gather_into_tensor(x, parts),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
    }
    for name, run in runs.items():
        seconds = []
        for _ in range(_REPEATS):
            device.synchronize()
            began = time.perf_counter()
            run()
            device.synchronize()
            seconds.append(time.perf_counter() - began)
        yield Row(
            SECTION,
            f"{name}, speed",
            f"{_MIB} MiB in {min(seconds) * 1e3:.3g} ms: {_MIB / 1024 / min(seconds):.3g} GiB/s",
        )
