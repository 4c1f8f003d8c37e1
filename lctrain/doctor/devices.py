"""The devices: how many, what memory is free, what they can compute, who else uses them."""

from __future__ import annotations

import re

from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, fault, ok, warning
from lctrain.doctor.probe import Card
from lctrain.runtime.ascend import AUTOLOAD, autoloads, build_problem, pair_problem, soc
from lctrain.runtime.environment import allocator_problem

_GIB = 2**30
_MOSTLY_FREE = 0.9

# A process in the last table of npu-smi info: card, chip, process id, name, memory in MB.
_NPU_PROCESS = re.compile(r"^\|\s*(\d+)\s+\d+\s*\|\s*(\d+)\s*\|\s*([^|]*?)\s*\|\s*(\d+)\s*\|", re.MULTILINE)


def cards(facts: Facts) -> Finding | None:
    """Devices and their memory; why there are none, where no other check says it."""
    if facts.probe.error is not None:
        return None if _explained(facts) else fault("devices", facts.probe.error, facts.probe.mend)
    found = facts.probe.cards
    if facts.kind == "cpu":
        return ok("devices", f"host memory {_gib(facts.host)} GiB free")
    if not found and facts.kind == "npu" and not autoloads(facts.env):
        text = f"no npu device is visible: {AUTOLOAD}={facts.env[AUTOLOAD]} keeps torch_npu out of device=auto"
        return fault("devices", text, f"unset {AUTOLOAD}, or give device=npu")
    if not found:
        visible = "ASCEND_RT_VISIBLE_DEVICES" if facts.kind == "npu" else "CUDA_VISIBLE_DEVICES"
        return fault("devices", f"no {facts.kind} device is visible", f"check the driver and {visible}")
    text = f"{len(found)} x {found[0].name}, GiB free: " + ", ".join(_gib(card) for card in found)
    taken = [str(index) for index, card in enumerate(found) if card.free < _MOSTLY_FREE * card.total]
    if taken:
        return warning("devices", text, f"end what holds memory of {facts.kind} {', '.join(taken)} before training")
    return ok("devices", text)


def bf16(facts: Facts) -> Finding | None:
    """Whether precision=bf16 exists."""
    if not facts.probe.cards:
        return None
    name = facts.probe.cards[0].name
    if not facts.probe.bf16:
        stops = ", and its fp16 stops at 65504 where others overflow" if soc(name).saturates else ""
        return warning("bf16", f"{name} has no bf16 arithmetic{stops}", "use precision=fp16, or fp32 where it fits")
    return ok("bf16", f"{name} computes in bf16")


def processes(facts: Facts) -> Finding | None:
    """Processes on the cards, as far as the vendor's tool sees them."""
    if not facts.tool:
        return None
    if facts.processes is None:
        return ok("processes", f"{facts.tool} is not here or does not answer: nobody looked for processes on the cards")
    found = npu_processes(facts.processes) if facts.kind == "npu" else facts.processes.strip().splitlines()
    if not found:
        return ok("processes", "none on the cards")
    return warning("processes", f"on the cards: {'; '.join(found)}", "end them if a run that was killed left them")


def _explained(facts: Facts) -> bool:
    """Whether a check of packages or settings names the reason."""
    packages = facts.packages
    absent = packages.torch is None or (facts.kind == "npu" and packages.torch_npu is None)
    unfit = pair_problem(packages) or build_problem(packages, facts.env) or facts.probe.missing_library
    without_cuda = facts.kind == "cuda" and packages.cuda is None
    allocators = facts.kind == "npu" and allocator_problem(facts.env) is not None
    return absent or unfit is not None or without_cuda or allocators


def _gib(card: Card) -> str:
    return f"{card.free / _GIB:.1f} of {card.total / _GIB:.1f}"


def npu_processes(text: str) -> list[str]:
    """Each process that `npu-smi info` lists, in words."""
    return [
        f"process {number} ({name}) holds {megabytes} MB of npu {card}"
        for card, number, name, megabytes in _NPU_PROCESS.findall(text)
    ]
