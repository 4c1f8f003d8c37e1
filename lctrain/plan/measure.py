"""The first steps of a job on real ranks, measured: what plan.calibrate and the accuracy benchmark compare with."""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lctrain.errors import EXIT_OK
from lctrain.plan.job import build, make_batch, run_step, without_data
from lctrain.plan.simulate import TRACED_MICRO_STEPS
from lctrain.plan.trace import WRAPPERS
from lctrain.runtime.device import Accelerator
from lctrain.train.session import Session

MEASURED = "measured.json"
_TIMED_STEPS = 2
_MEASURED_STEPS = 3
_MOMENT_S = 0.002


@dataclass(frozen=True)
class Measured:
    """One rank. peak_bytes: most tensor memory held in a step. step_s: of a whole step, all its micro-steps."""

    peak_bytes: int
    step_s: float


def rank_main(session: Session) -> int:
    """Measure on this rank; the first writes run_dir/measured.json."""
    measured = measure(session)
    if session.ranks.is_main:
        path = Path(str(session.config.run_dir)) / MEASURED
        path.write_text(json.dumps(asdict(measured)), encoding="utf-8")
    return EXIT_OK


def measure(session: Session) -> Measured:
    """Run steps on data of the right shape. A collective over all ranks."""
    session.config = without_data(session.config, session.ranks.world_size)
    session.log = lambda line: None  # type: ignore[assignment]
    mesh = session.connect()
    accumulation = session.resolved.accumulation
    traced = min(accumulation, TRACED_MICRO_STEPS)
    meter = _Meter(mesh.device)
    with meter.watching():
        job, _ = build(session, mesh, kernel=None, real=True)
        batch = make_batch(session.config)
        with _LastToLetGo() if mesh.device.type == "cpu" else nullcontext():
            # DDP lays its buckets out anew in its second step.
            for mark in (lambda: None, *[meter.restart] * (_MEASURED_STEPS + 1)):
                run_step(job, batch, traced, lambda phase: None)
                mesh.device.synchronize()
                mark()
    times = []
    for _ in range(_TIMED_STEPS):
        mesh.barrier()
        began = time.perf_counter()
        run_step(job, batch, accumulation, lambda phase: None)
        mesh.device.synchronize()
        times.append(time.perf_counter() - began)
    return Measured(meter.peak_bytes, mesh.max_over_all(min(times)))


def _libraries_own(device: Accelerator) -> int:
    """Bytes that stay allocated after a product and its gradient: workspaces of libraries, no job's tensors."""
    x = torch.ones(64, 64, device=device.torch_device, requires_grad=True)
    (x @ x).sum().backward()
    device.synchronize()
    del x
    device.reset_peak_memory()
    return device.peak_memory_bytes()


class _Meter:
    """Peak of tensor memory by the allocator's own account: the device's, or on a CPU what the profiler hears."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._peaks: list[int] = []
        self._restarted = False
        self._before = 0

    @property
    def peak_bytes(self) -> int:
        """The least of the steps' peaks: what is not heard of being freed only ever adds to one."""
        return min(self._peaks)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around everything that holds tensors."""
        if self._device.type != "cpu":
            self._before = _libraries_own(self._device)
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            yield
        self._peaks = _cpu_peaks(profiler)

    def restart(self) -> None:
        """A step's peak counts from one of these to the next."""
        if self._device.type != "cpu":
            if self._restarted:
                self._peaks.append(self._device.peak_memory_bytes() - self._before)
            self._restarted = True
            self._device.reset_peak_memory()
            return
        with torch.profiler.record_function(_RESTART):
            pass


_RESTART = "lctrain_plan_restart"


class _LastToLetGo(TorchDispatchMode):
    """Keeps what a collective was given until the next operation and a moment more.

    gloo's threads hold on to it too; if one of them were the last to let go, the profiler, which listens to the main
    thread, would not hear of the memory being freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, first letting go of what the collective before it was given."""
        if any(issubclass(t, WRAPPERS) for t in types):
            return NotImplemented
        if self._sent:
            time.sleep(_MOMENT_S)
            self._sent = []
        if func.namespace == "c10d":
            self._sent = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def _cpu_peaks(profiler: torch.profiler.profile) -> list[int]:
    """Most bytes held between one restart and the next, all allocations since the profiler started added up.

    Copies that gloo makes of messages are left out: it frees them whenever its threads get to it, and on a device the
    communication library keeps its own.
    """
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    assert results is not None
    events = sorted(_walk(results.experimental_event_tree(), theirs=False), key=lambda e: e[0].start_time_ns)
    main = next(event for event, _ in events if event.name == _RESTART)
    blocks = LiveBlocks()
    peaks: list[int] = []
    for event, theirs in events:
        if event.name == _RESTART:
            peaks.append(0)
        if event.typed[0] != _EventType.Allocation:
            continue
        address, size = event.typed[1].ptr, event.typed[1].alloc_size
        if size < 0:
            blocks.free(address)
        else:
            blocks.allocate(address, size, counted=not theirs and event.start_tid == main.start_tid)
            if peaks:
                peaks[-1] = max(peaks[-1], blocks.held)
    return peaks[:-1]  # what follows the last restart is no step


class LiveBlocks:
    """Blocks of memory by address. held: bytes of those that count.

    The profiler does not hear of what gloo's threads free; but where a new block begins no old one can be.
    """

    def __init__(self) -> None:
        self.held = 0
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, bool]] = {}

    def allocate(self, address: int, size: int, *, counted: bool) -> None:
        """A new block, in whose place there is no other any more."""
        place = bisect.bisect_right(self._starts, address)
        if place and (before := self._starts[place - 1]) + self._blocks[before][0] > address:
            self.free(before)
            place -= 1
        while place < len(self._starts) and self._starts[place] < address + size:
            self.free(self._starts[place])
        self._starts.insert(place, address)
        self._blocks[address] = size, counted
        self.held += size if counted else 0

    def free(self, address: int) -> None:
        """The end of a block; of none when it is not known."""
        size, counted = self._blocks.pop(address, (0, False))
        if size:
            self._starts.remove(address)
        self.held -= size if counted else 0


def _walk(events: Iterable[Any], *, theirs: bool) -> Iterator[tuple[Any, bool]]:
    """Every event, and whether it happens inside a collective."""
    for event in events:
        inside = theirs or event.name.startswith("c10d::")
        yield event, inside
        yield from _walk(event.children, theirs=inside)
