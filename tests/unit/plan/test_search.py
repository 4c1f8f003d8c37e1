"""The longest sequence that fits, and the fewest changes that make a job fit."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.hardware import Hardware, load_hardware
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError
from lctrain.plan.derived import quick_plan
from lctrain.plan.search import STEP_TOKENS, _changes, _sets, fewest_changes, longest

MIB = 2**20


def tiny(*words: str, length: int = 2048) -> TrainConfig:
    """The demo's recipe."""
    return compose_config(["recipe=llama_tiny_32k", f"data.max_length={length}", *words])


def room(size: float) -> Hardware:
    """A card with so many bytes, which takes nothing for itself."""
    return replace(load_hardware("a100"), usable_gib=size / 2**30, context_gib=0.0, communicator_mib=0.0, rounding=1)


def said(line: str) -> None:
    """Nobody listens."""


@lru_cache
def peak(*words: str, length: int = 2048) -> int:
    """Bytes of a job on two ranks."""
    return quick_plan(tiny(*words, length=length), room(2**40), 2).peak_bytes


def test_the_longest_sequence_fits_and_the_next_step_does_not() -> None:
    """Whatever the model's position range: memory decides."""
    config = tiny("parallel=fsdp", "memory=full", "model.architecture.max_position_embeddings=1024")
    hardware = room(64 * MIB)
    found: list[str] = []
    length, plan = longest(config, hardware, 2, found.append)
    assert length % STEP_TOKENS == 0
    assert length > 2 * STEP_TOKENS
    assert plan.fits
    assert plan.config.documents.max_length == length
    assert plan.peak_bytes == peak("parallel=fsdp", "memory=full", length=length) <= hardware.usable_bytes
    assert peak("parallel=fsdp", "memory=full", length=length + STEP_TOKENS) > hardware.usable_bytes
    assert len(found) < 8  # a line through two sizes, not a walk
    assert all("tokens" in line for line in found)
    assert config.language_model.architecture["max_position_embeddings"] == 1024  # ours, untouched


def test_a_card_for_which_nothing_is_short_enough() -> None:
    with pytest.raises(ConfigError, match=r"not even 1,024 tokens fit on NVIDIA A100.*plan\.fit=true"):
        longest(tiny("parallel=ddp"), room(8 * MIB), 2, said)


def test_images_have_no_length() -> None:
    config = compose_config(["recipe=resnet8_fashion_mnist"])
    with pytest.raises(ConfigError, match=r"plan\.max_length=auto is for sequences and model=resnet has none"):
        longest(config, room(48 * MIB), 2, said)


def fitted(hardware: Hardware, *words: str) -> tuple[str, ...] | None:
    """The changes that are found; they are what makes the job fit, given on the command line."""
    outcome = fewest_changes(tiny(*words), hardware, 2, said)
    if outcome is None:
        return None
    assert outcome.plan is not None
    assert outcome.plan.fits
    # Pasted behind the job's own words they select the very job that was planned.
    pasted = quick_plan(tiny(*words, *outcome.words), hardware, 2)
    assert pasted.fits
    assert pasted.peak_bytes == outcome.plan.peak_bytes
    return outcome.words


def test_sharding_alone_is_found_where_it_is_enough() -> None:
    whole, sharded = peak("parallel=ddp", "memory=none"), peak("parallel=fsdp", "memory=none")
    assert sharded < whole
    assert fitted(room((whole + sharded) / 2), "parallel=ddp", "memory=none") == ("parallel=fsdp",)


def test_splitting_the_sequence_is_found_where_sharding_is_not_enough() -> None:
    sharded, split = (peak(f"parallel={name}", "memory=none") for name in ("fsdp", "fsdp_sp"))
    assert fitted(room((sharded + split) / 2), "parallel=ddp", "memory=none") == ("parallel=fsdp_sp",)


def test_a_smaller_micro_batch_comes_first() -> None:
    words = ("parallel=fsdp", "memory=full", "train.micro_batch_size=4", "train.global_batch_size=8")
    four = peak(*words)
    assert fitted(room(four - 1), *words) == ("train.micro_batch_size=2",)


def test_nothing_is_found_where_nothing_helps() -> None:
    """One rank with fewer bytes than the model's weights, and nothing offloaded that holds them."""
    assert fewest_changes(tiny("parallel=single"), room(MIB), 1, said) is None


def test_sets_are_small_first_and_have_one_change_of_a_kind() -> None:
    changes = list(_changes(tiny("parallel=ddp", "memory=none", "train.micro_batch_size=2"), 2))
    sets = list(_sets(changes))
    assert [len(s) for s in sets] == sorted(len(s) for s in sets)
    assert {len(s) for s in sets} == {1, 2, 3}
    assert [s[0] for s in sets if len(s) == 1] == changes
    assert all(len({c.kind for c in s}) == len(s) for s in sets)


def test_what_a_job_already_does_is_no_change() -> None:
    def offered(*words: str, ranks: int = 2) -> list[str]:
        return [" ".join(c.words) for c in _changes(tiny(*words), ranks)]

    assert offered("parallel=ddp", "memory=none", "train.micro_batch_size=8", "train.global_batch_size=16") == [
        "train.micro_batch_size=4",
        "train.micro_batch_size=1",
        "memory.loss_chunk_mb=64",
        "parallel=fsdp",
        "parallel=fsdp_sp",
        "memory=selective",
        "memory=full",
        "memory=offload",
        "memory.tiled_mlp=8",
        "parallel=fsdp parallel.offload_params=true",
    ]
    assert offered("parallel=fsdp", "memory=full", "memory.loss_chunk_mb=64", "memory.tiled_mlp=4") == [
        "parallel=fsdp_sp",
        "memory=offload",
        "parallel.offload_params=true",
    ]
    assert offered("parallel=single", "memory=offload", "memory.tiled_mlp=8", ranks=1) == ["memory.loss_chunk_mb=64"]


def test_every_change_is_what_its_words_say() -> None:
    """Applied to the typed config, or written behind the job's words: the same job."""
    words = ("parallel=ddp", "memory=none")
    config = tiny(*words)
    for change in _changes(config, 2):
        pasted = tiny(*words, *change.words)
        changed = change.apply(config)
        assert (changed.parallel, changed.memory, changed.train) == (pasted.parallel, pasted.memory, pasted.train)
