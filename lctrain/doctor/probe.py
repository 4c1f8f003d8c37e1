"""`python -m lctrain.doctor.probe DEVICE`: what importing torch and asking the devices gives, as JSON lines.

A process of its own, because importing an accelerator package can end the process. Each line is the whole answer so
far, so that the last one says how far it came.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from lctrain.config.root import Device
from lctrain.errors import DeviceError
from lctrain.runtime.ascend import WITHOUT_NPU, import_torch, missing_library, read_packages, transferred
from lctrain.runtime.device import Accelerator, count, wanted_type
from lctrain.runtime.failures import known_failure

_LIMIT_S = 120
_MEND = f"see what npu-smi info or nvidia-smi says of driver and cards, install torch again, or {WITHOUT_NPU}"


@dataclass(frozen=True)
class Card:
    """One device: the vendor's name, and its memory in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Probe:
    """What a fresh process found.

    stage: what it did last. error: why it got no further; mend: what to do about that. missing_library: of CANN.
    device_type: what device=DEVICE means here; cards: its devices (none for cpu). bf16: whether they compute in it.
    """

    stage: str = "start"
    error: str | None = None
    mend: str = ""
    missing_library: str | None = None
    device_type: str | None = None
    transferred: bool = False
    bf16: bool = True
    cards: tuple[Card, ...] = ()


def run_probe(device: Device) -> Probe:
    """Probe in a new process of this interpreter, for two minutes at most."""
    words = [sys.executable, "-m", "lctrain.doctor.probe", device.name]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as late:
        found = read_probe(late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or "")
        return replace(found, error=f"{found.stage} took more than {_LIMIT_S} s", mend=_MEND)
    found = read_probe(done.stdout)
    if done.returncode == 0:
        return found
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    said = done.stderr.strip().splitlines()
    ended = f"{found.stage} ended the process with {how}" + (f" ({said[-1]})" if said else "")
    return replace(found, error=ended, mend=_MEND)


def read_probe(text: str) -> Probe:
    """The last answer among the lines a probe printed, which libraries may have printed between."""
    found = Probe()
    for line in text.splitlines():
        if line.startswith('{"stage"'):
            raw: dict[str, Any] = json.loads(line)
            found = Probe(**{**raw, "cards": tuple(Card(**card) for card in raw["cards"])})
    return found


def main() -> None:
    """Look, one stage after another, until one fails."""
    device = Device[sys.argv[1]]
    found = _say(Probe(stage="looking for CANN"))
    if read_packages().torch_npu is not None:
        found = replace(found, missing_library=missing_library())
    found = _say(replace(found, stage="importing torch"))
    try:
        import_torch(device)
        found = _say(replace(found, stage="asking for devices"))
        kind = wanted_type(device)
        number = count(kind) or 0
        found = _say(replace(found, stage="asking the devices", device_type=kind, transferred=transferred()))
        cards = [Accelerator(kind, index) for index in range(number)]
        _say(
            replace(
                found,
                stage="done",
                bf16=all(card.supports_bf16() for card in cards[:1]),
                cards=tuple(Card(c.name, c.free_memory_bytes(), c.total_memory_bytes()) for c in cards),
            )
        )
    except (ImportError, RuntimeError, DeviceError) as error:
        known = error if isinstance(error, DeviceError) else known_failure(error)
        text, _, mend = " ".join(str(known or error).split()).partition("; ")
        _say(replace(found, error=text, mend=mend if known else _MEND))


def _say(found: Probe) -> Probe:
    print(json.dumps(asdict(found)), flush=True)
    return found


if __name__ == "__main__":
    main()
