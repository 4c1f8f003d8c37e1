"""Layer inputs in host memory between forward and backward, copied beside the computation.

On an accelerator a side stream copies each input out to pinned memory while the layer computes; in the
backward, asking for one layer's input also starts fetching that of the layer before, so that it is there
when its turn comes. On the CPU, which has one memory, inputs are copied and nothing is saved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class _Moved:
    """One input. device_copy: fetched and not yet used. ready: the event after which `host` is complete."""

    host: torch.Tensor
    device: torch.device
    ready: Any = None
    device_copy: torch.Tensor | None = None
    before: _Moved | None = field(default=None, repr=False)


def _place(x: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Which memory a tensor is. A storage's own address also tells tensors without memory apart, as in a plan."""
    return x.untyped_storage()._cdata, int(x.storage_offset()), x.shape


class HostInputs:
    """Shared by a model's layers; layers must run in order and backward in the reverse one."""

    def __init__(self) -> None:
        self._last: _Moved | None = None
        self._streams: dict[torch.device, Any] = {}

    def moved(self, states: torch.Tensor) -> AbstractContextManager[None]:
        """Save `states` in host memory wherever autograd would save it inside the context."""
        # By value: autograd keeps the hooks as long as its graph, and with them whatever they refer to.
        place = _place(states)

        def pack(x: torch.Tensor) -> torch.Tensor | _Moved:
            return self._out(x) if _place(x) == place else x

        def unpack(x: torch.Tensor | _Moved) -> torch.Tensor:
            return x if isinstance(x, torch.Tensor) else self._back(x)

        return saved_tensors_hooks(pack, unpack)

    def _out(self, x: torch.Tensor) -> _Moved:
        if x.device.type == "cpu":
            moved = _Moved(x.clone(), x.device)
        else:
            stream = self._stream(x.device)
            stream.wait_stream(torch.accelerator.current_stream(x.device))
            with stream:
                host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                host.copy_(x, non_blocking=True)
            x.record_stream(stream)
            moved = _Moved(host, x.device, stream.record_event())
        moved.before, self._last = self._last, moved
        return moved

    def _back(self, moved: _Moved) -> torch.Tensor:
        if self._last is moved:
            self._last = moved.before
        if moved.device_copy is None:
            self._fetch(moved)
        if moved.before is not None and moved.before.device_copy is None:
            self._fetch(moved.before)
        x = moved.device_copy
        assert x is not None
        if moved.device.type != "cpu":
            torch.accelerator.current_stream(moved.device).wait_stream(self._stream(moved.device))
            x.record_stream(torch.accelerator.current_stream(moved.device))
        moved.device_copy, moved.before = None, None
        return x

    def _fetch(self, moved: _Moved) -> None:
        if moved.device.type == "cpu":
            moved.device_copy = moved.host
            return
        stream = self._stream(moved.device)
        stream.wait_event(moved.ready)
        with stream:
            moved.device_copy = moved.host.to(moved.device, non_blocking=True)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
