"""The peak of hand-built lists of events, and what each block is told to be with hindsight."""

from __future__ import annotations

import pytest

from lctrain.plan.marks import HOST
from lctrain.plan.memory import CATEGORIES, Peak, categories, find_peak, region_of, region_peaks, stacked
from lctrain.plan.trace import Block, Event

FORWARD, BACKWARD, UPDATE = "forward 1", "backward 1", "optimizer"


class Story:
    """Events as a program would make them, one call an event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def made(
        self, size: int, phase: str, *, hint: str | None = None, place: str | None = None, sent: bool = False
    ) -> Block:
        """A block appears."""
        block = Block(size, phase, hint, collective=sent)
        self.events.append(Event(block, size, phase, place or phase))
        return block

    def changed(self, block: Block, delta: int, phase: str, place: str | None = None) -> None:
        """A block grows, shrinks, or goes."""
        block.size += delta
        self.events.append(Event(block, delta, phase, place or phase))

    def gone(self, block: Block, phase: str) -> None:
        """A block is freed."""
        self.changed(block, -block.size, phase)


def step() -> Story:
    """Weights of 100 and moments of 200; 40 kept for the backward; scratch of 7 and 30; a gradient of 100."""
    story = Story()
    story.made(100, "start", hint="parameters")
    story.made(200, "start", hint="optimizer_state")
    scratch = story.made(7, FORWARD)
    kept = story.made(40, FORWARD, place="forward 1, layer 1 of 1")
    story.gone(scratch, FORWARD)
    message = story.made(11, BACKWARD, sent=True)
    big = story.made(30, BACKWARD, place="backward 1, layer 1 of 1")  # 381: the fullest moment
    story.gone(message, BACKWARD)
    story.gone(big, BACKWARD)
    story.gone(kept, BACKWARD)
    gradient = story.made(70, BACKWARD, hint="gradients")
    story.made(5, UPDATE)
    story.gone(gradient, UPDATE)
    return story


def test_the_peak_is_the_fullest_moment_and_its_categories_add_up_to_it() -> None:
    peak = find_peak(step().events)
    assert peak.bytes == 100 + 200 + 40 + 11 + 30
    assert peak.place == "backward 1, layer 1 of 1"
    held = {name: size for name, size in peak.by_category.items() if size}
    assert held == {
        "parameters": 100,
        "optimizer_state": 200,
        "activations": 40,
        "communication": 11,
        "temporary": 30,
    }
    assert set(peak.by_category) == set(CATEGORIES)
    assert sum(peak.by_category.values()) == peak.bytes
    assert peak.host_bytes == 0


def test_every_region_has_a_peak_of_its_own() -> None:
    peaks = region_peaks(step().events)
    assert {name: peak.bytes for name, peak in peaks.items()} == {
        "start": 300,
        "forward 1": 340,
        "forward 1 second half": 347,
        "backward 1": 370,  # the gradient of 70 where activations were
        "backward 1 second half": 381,
        "optimizer": 375,
    }
    assert max(peaks.values(), key=lambda p: p.bytes) == find_peak(step().events)
    for peak in peaks.values():
        assert sum(peak.by_category.values()) == peak.bytes


@pytest.mark.parametrize(
    ("place", "region"),
    [
        ("forward 1", "forward 1"),
        ("forward 1, layer 1 of 4", "forward 1 first half"),
        ("forward 1, layer 2 of 4", "forward 1 first half"),
        ("forward 1, layer 3 of 4", "forward 1 second half"),
        ("forward 1, layer 2 of 3", "forward 1 second half"),
        ("forward 1, layer 1 of 1", "forward 1 second half"),
        ("forward 1, layer 10 of 32", "forward 1 first half"),
    ],
)
def test_regions_are_halves_of_a_pass(place: str, region: str) -> None:
    assert region_of(Event(Block(1, FORWARD), 1, FORWARD, place)) == region


def test_categories_are_told_with_hindsight() -> None:
    story = Story()
    held = story.made(1, "start")
    dies_in_forward = story.made(1, FORWARD)
    outlives = story.made(1, FORWARD)
    outlives_and_is_sent = story.made(1, FORWARD, sent=True)
    sent = story.made(1, FORWARD, sent=True)
    hinted = story.made(1, FORWARD, hint="logits_and_loss")
    story.gone(dies_in_forward, FORWARD)
    story.gone(sent, FORWARD)
    scratch = story.made(1, BACKWARD)
    never_freed = story.made(1, BACKWARD)
    received = story.made(1, BACKWARD, sent=True)
    for block in (outlives, outlives_and_is_sent, hinted, scratch, received):
        story.gone(block, BACKWARD)
    of_update = story.made(1, UPDATE, hint="gradients")
    told = categories(story.events)
    assert [told[b] for b in (held, dies_in_forward, scratch, never_freed)] == ["temporary"] * 4
    assert [told[b] for b in (outlives, outlives_and_is_sent)] == ["activations"] * 2
    assert [told[b] for b in (sent, received)] == ["communication"] * 2
    assert told[hinted] == "logits_and_loss"
    assert told[of_update] == "gradients"


def test_a_block_that_outlives_its_own_forward_pass_only_is_an_activation_of_it() -> None:
    """Of two micro-steps, what the first keeps is gone before the second begins."""
    story = Story()
    first = story.made(8, FORWARD)
    story.gone(first, BACKWARD)
    second = story.made(8, "forward 2")
    scratch = story.made(4, "forward 2")
    story.gone(scratch, "forward 2")
    story.gone(second, "backward 2")
    told = categories(story.events)
    assert (told[first], told[second], told[scratch]) == ("activations", "activations", "temporary")


def test_what_lies_in_host_memory_is_counted_apart() -> None:
    story = Story()
    story.made(100, "start", hint="optimizer_state")
    moved = story.made(64, FORWARD, hint=HOST)
    kept = story.made(10, FORWARD)
    story.gone(moved, BACKWARD)
    story.gone(kept, BACKWARD)
    late = story.made(20, BACKWARD, hint=HOST)
    story.gone(late, BACKWARD)
    peak = find_peak(story.events)
    assert (peak.bytes, peak.host_bytes) == (110, 64)
    assert sum(peak.by_category.values()) == 110
    offloaded = find_peak(story.events, on_host=frozenset({HOST, "optimizer_state"}))
    assert (offloaded.bytes, offloaded.host_bytes) == (10, 164)
    assert offloaded.by_category["optimizer_state"] == 0


def test_gathered_memory_that_comes_and_goes_is_held_once() -> None:
    story = Story()
    layer = story.made(50, FORWARD, hint="gathered_parameters")
    story.changed(layer, -50, FORWARD)
    other = story.made(30, FORWARD, hint="gathered_parameters")
    story.changed(other, -30, FORWARD)
    story.changed(layer, 50, BACKWARD)
    peak = find_peak(story.events)
    assert peak.bytes == peak.by_category["gathered_parameters"] == 50


def test_an_allocator_rounds_every_block_up() -> None:
    story = Story()
    story.made(1, "start", hint="parameters")
    story.made(512, "start", hint="parameters")
    story.made(513, "start", hint="parameters")
    story.made(100, "start", hint=HOST)
    empty = story.made(300, FORWARD)
    story.gone(empty, FORWARD)
    story.made(700, BACKWARD)
    peak = find_peak(story.events, rounding=512)
    assert peak.bytes == 1 + 512 + 513 + 700
    assert peak.rounding == 511 + 0 + 511 + 324
    assert find_peak(story.events).rounding == 0


def test_the_first_of_equal_moments_is_the_peak() -> None:
    story = Story()
    first = story.made(5, FORWARD)
    story.gone(first, FORWARD)
    story.made(5, BACKWARD)
    assert find_peak(story.events).place == FORWARD


def test_stacked_series_end_at_what_is_held_and_reach_the_peak() -> None:
    story = step()
    series = stacked(story.events)
    assert all(len(values) == len(story.events) for values in series.values())
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    assert max(totals) == find_peak(story.events).bytes
    assert totals[-1] == 100 + 200 + 5
    without = stacked(story.events, frozenset({HOST, "optimizer_state"}))
    assert set(without["optimizer_state"]) == {0}
    assert [t - w for t, w in zip(totals, map(sum, zip(*without.values(), strict=True)), strict=True)][1:] == [200] * (
        len(totals) - 1
    )


def test_a_peak_is_a_value() -> None:
    assert find_peak(step().events) == find_peak(step().events)
    assert isinstance(find_peak(step().events), Peak)
