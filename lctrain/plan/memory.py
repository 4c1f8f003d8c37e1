"""The peak of a trace, and what each byte of it is for, told with hindsight."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lctrain.plan.marks import HOST
from lctrain.plan.trace import Block, Event

CATEGORIES = (
    "parameters",
    "master_weights",
    "gradients",
    "optimizer_state",
    "gathered_parameters",
    "activations",
    "logits_and_loss",
    "communication",
    "temporary",
)
"""In the order they are printed and stacked. parameters: in the compute dtype (or fp32, when that is it);
master_weights: the fp32 ones of mixed precision."""


@dataclass(frozen=True)
class Peak:
    """bytes: held on the device at the fullest moment, by category. host_bytes: the most that is in host memory.

    place: where the program was. rounding: bytes that an allocator adds by rounding each block up.
    """

    bytes: int
    by_category: dict[str, int]
    host_bytes: int
    place: str
    rounding: int


def find_peak(events: Sequence[Event], *, on_host: frozenset[str] = frozenset({HOST}), rounding: int = 1) -> Peak:
    """The fullest moment of `events`. on_host: categories that are not on the device."""
    peaks = region_peaks(events, on_host=on_host, rounding=rounding, region=lambda event: "")
    return peaks[""]


def region_of(event: Event) -> str:
    """Where the fullest moment may move to when a model gets deeper: a pass's first or second half of layers."""
    found = re.search(r"layer (\d+) of (\d+)", event.place)
    half = "" if found is None else " first half" if 2 * int(found[1]) <= int(found[2]) else " second half"
    return event.phase + half


def region_peaks(
    events: Sequence[Event],
    *,
    on_host: frozenset[str] = frozenset({HOST}),
    rounding: int = 1,
    region: Callable[[Event], str] = region_of,
) -> dict[str, Peak]:
    """The fullest moment of every region."""
    names = categories(events)
    held = host = most_on_host = 0
    highest: dict[str, tuple[int, int]] = {}
    for index, event in enumerate(events):
        if names[event.block] in on_host:
            host += event.delta
            most_on_host = max(most_on_host, host)
            continue
        held += event.delta
        where = region(event)
        if held > highest.get(where, (0, 0))[0]:
            highest[where] = held, index
    wanted = {index: where for where, (_, index) in highest.items()}
    peaks: dict[str, Peak] = {}
    sizes: dict[Block, int] = {}
    for index, event in enumerate(events):
        sizes[event.block] = sizes.get(event.block, 0) + event.delta
        if index in wanted:
            on_device = {block: size for block, size in sizes.items() if names[block] not in on_host}
            by_category = dict.fromkeys(CATEGORIES, 0)
            for block, size in on_device.items():
                by_category[names[block]] += size
            added = sum(-size % rounding for size in on_device.values())
            peaks[wanted[index]] = Peak(highest[wanted[index]][0], by_category, most_on_host, event.place, added)
    return peaks


def categories(events: Sequence[Event]) -> dict[Block, str]:
    """The category of each block.

    Without a hint, a block made in a forward pass that outlives it is an activation kept for the backward; what a
    collective sends or receives is communication; the rest is temporary.
    """
    ends = {e.phase: i for i, e in enumerate(events) if e.phase.startswith("forward")}
    died = {e.block: i for i, e in enumerate(events) if e.delta < 0}
    found: dict[Block, str] = {}
    for event in events:
        block = event.block
        if block in found:
            continue
        forward_end = ends.get(block.phase)
        if block.hint is not None:
            found[block] = block.hint
        elif forward_end is not None and died.get(block, len(events)) > forward_end:
            found[block] = "activations"
        elif block.collective:
            found[block] = "communication"
        else:
            found[block] = "temporary"
    return found


def stacked(events: Sequence[Event], on_host: frozenset[str] = frozenset({HOST})) -> dict[str, list[int]]:
    """Bytes of each category after every event, for a picture."""
    names = categories(events)
    held = dict.fromkeys(CATEGORIES, 0)
    series: dict[str, list[int]] = {name: [] for name in CATEGORIES}
    for event in events:
        name = names[event.block]
        if name not in on_host:
            held[name] += event.delta
        for key, value in held.items():
            series[key].append(value)
    return series
