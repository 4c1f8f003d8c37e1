"""What devices and their communication libraries say when they fail, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from lctrain.errors import DeviceError

# The code CANN puts into the text of an error: what it means, and what mends it.
_CODES = {
    "EJ0001": (
        "a process still holds the card, as after a run that was killed",
        "wait ten seconds and start again; if it stays, npu-smi info lists the processes to end",
    ),
    "EI0006": (
        "ranks did not meet within HCCL_CONNECT_TIMEOUT={HCCL_CONNECT_TIMEOUT} s",
        "look for an earlier error of another rank; if ranks only start far apart, raise HCCL_CONNECT_TIMEOUT; across "
        "nodes, check that HCCL_SOCKET_IFNAME names a network that joins them",
    ),
    "EI0002": (
        "a rank waited in a collective for HCCL_EXEC_TIMEOUT={HCCL_EXEC_TIMEOUT} s",
        "look for an earlier error of another rank; if one is only slow, raise launch.timeout_s",
    ),
}

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_RAN_OUT = ("out of memory", "DefaultCPUAllocator: can't allocate memory")


def known_failure(error: BaseException, env: Mapping[str, str] = os.environ) -> DeviceError | None:
    """The message for a failure that CANN names with a code we know; None for any other error."""
    text = str(error)
    for code, (what, mend) in _CODES.items():
        if code in text:
            values = {name: env.get(name, "its default") for name in re.findall(r"{(\w+)}", what)}
            return DeviceError(f"{code}: {what.format(**values)}; {mend}")
    return None


def out_of_memory(error: BaseException) -> str | None:
    """How much was asked for when memory ran out ("some memory" where it is not said); None for any other error."""
    import torch

    text = str(error)
    if not (
        isinstance(error, torch.OutOfMemoryError)
        or (isinstance(error, RuntimeError) and any(words in text for words in _RAN_OUT))
    ):
        return None
    found = _ASKED.search(text)
    if found is None:
        return "some memory"
    number, unit = found.groups()
    return f"{int(number) / 2**30:.2f} GiB" if unit == "bytes" else f"{number} {unit}"
