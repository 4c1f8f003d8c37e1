"""Which layouts are compared, who is refused before any trace, and how outcomes are ranked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.hardware import Hardware, load_hardware
from lctrain.config.parallel import FsdpSpConfig, FsdpTpConfig, FsdpUspConfig, ParallelConfig, Zero3OffloadConfig
from lctrain.config.registry import classes
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError
from lctrain.plan.layouts import (
    LEANEST_FIRST,
    Candidate,
    Outcome,
    _rank,
    _variants,
    attempt,
    candidates,
    model_counts,
    refused_by_hand,
)
from lctrain.train.memory_check import ModelCounts

SEVEN_B = ModelCounts(6_738_415_616, 6_738_415_616, layers=32, width=4096)


def tiny(*words: str) -> TrainConfig:
    """The demo's recipe, short."""
    return compose_config(["recipe=llama_tiny_32k", "data.max_length=256", *words])


def room(gib: float) -> Hardware:
    """A card with so much, which takes nothing for itself."""
    return replace(load_hardware("a100"), usable_gib=gib, context_gib=0.0, communicator_mib=0.0, rounding=1)


def words(found: list[Candidate]) -> list[str]:
    """Overrides of candidates."""
    return [" ".join(c.words) for c in found]


def test_all_layouts_on_eight_ranks() -> None:
    assert words(candidates("all", 8, language=True)) == [
        "parallel=ddp",
        "parallel=fsdp",
        "parallel=hsdp",
        "parallel=fsdp_sp parallel.sp_size=8",
        "parallel=fsdp_sp parallel.sp_size=4",
        "parallel=fsdp_cp parallel.cp_size=8",
        "parallel=fsdp_cp parallel.cp_size=4",
        "parallel=fsdp_usp parallel.sp_size=4 parallel.cp_size=2",
        "parallel=fsdp_tp parallel.tp_size=8",
        "parallel=fsdp_tp parallel.tp_size=4",
        "parallel=zero1",
        "parallel=zero2",
        "parallel=zero3",
        "parallel=zero3_sp parallel.sp_size=8",
        "parallel=zero3_sp parallel.sp_size=4",
        "parallel=zero3_offload",
    ]


def test_every_layout_is_compared_on_some_number_of_ranks() -> None:
    found = {c.words[0].split("=")[1] for ranks in (1, 8) for c in candidates("all", ranks, language=True)}
    assert found == set(classes("parallel"))


def test_one_rank_has_one_layout_and_two_ranks_none_that_wants_four() -> None:
    assert words(candidates("all", 1, language=True)) == ["parallel=single"]
    two = words(candidates("all", 2, language=True))
    assert "parallel=fsdp_tp parallel.tp_size=2" in two
    assert not [w for w in two if "hsdp" in w or "usp" in w or "size=1" in w]


def test_images_have_data_parallel_layouts_only() -> None:
    assert words(candidates("all", 8, language=False)) == ["parallel=ddp", "parallel=fsdp", "parallel=hsdp"]


def test_a_list_is_taken_in_its_order_and_its_words_select_its_config() -> None:
    found = candidates(["fsdp_tp", "ddp", "fsdp_usp"], 4, language=True)
    assert words(found)[:3] == [
        "parallel=fsdp_tp parallel.tp_size=4",
        "parallel=fsdp_tp parallel.tp_size=2",
        "parallel=ddp",
    ]
    kinds = {FsdpTpConfig: found[0], FsdpUspConfig: found[3]}
    for kind, candidate in kinds.items():
        assert isinstance(candidate.parallel, kind)
    for candidate in found:
        assert tiny(*candidate.words).parallel == candidate.parallel


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ConfigError, match=r"plan\.layouts: fsdp3 is not a layout; layouts are single, ddp, fsdp"):
        candidates(["fsdp", "fsdp3"], 8, language=True)


def seven_b(parallel: ParallelConfig | None = None, *overrides: str) -> TrainConfig:
    """The 7B recipe."""
    config = compose_config(["recipe=llama7b_32k", "data.path=unread", *overrides])
    return config if parallel is None else replace(config, parallel=parallel)


def test_ddp_of_7b_is_refused_for_its_state() -> None:
    hardware = load_hardware("ascend910b3")
    reason = refused_by_hand(seven_b(None, "parallel=ddp"), hardware, 8, SEVEN_B)
    assert reason is not None
    # 16 bytes each of 6.74 billion numbers.
    assert reason.startswith("107.8 GB of weights, gradients and optimizer state a rank, and 65.5 GB are usable")
    assert refused_by_hand(seven_b(FsdpSpConfig()), hardware, 8, SEVEN_B) is None
    assert refused_by_hand(seven_b(None, "parallel=ddp"), replace(hardware, usable_gib=101), 8, SEVEN_B) is None


def test_what_is_offloaded_is_not_weighed_against_the_device() -> None:
    hardware = room(1)
    assert refused_by_hand(seven_b(Zero3OffloadConfig()), hardware, 8, SEVEN_B) is None
    assert refused_by_hand(seven_b(None, "parallel=fsdp", "parallel.offload_params=true"), hardware, 8, SEVEN_B) is None
    assert refused_by_hand(seven_b(None, "parallel=fsdp"), hardware, 8, SEVEN_B) is not None


def test_a_layout_that_cannot_be_is_an_outcome_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="does not divide the model's 32 attention heads"):
        refused_by_hand(seven_b(FsdpSpConfig()), room(64), 24, SEVEN_B)
    task = (tiny("train.global_batch_size=6"), room(8), 6, Candidate(("parallel=fsdp_sp",), FsdpSpConfig()), None)
    (outcome,) = _variants(task)
    assert outcome.plan is None
    assert outcome.reason is not None
    assert "attention heads" in outcome.reason


def test_7b_is_counted_without_memory() -> None:
    assert model_counts(seven_b()) == SEVEN_B
    adapters = model_counts(tiny("model.lora.rank=8"))
    assert adapters is not None
    assert 0 < adapters.trained < adapters.parameters
    assert model_counts(compose_config(["recipe=resnet8_fashion_mnist"])) is None


def test_variants_go_from_the_leanest_until_one_does_not_fit() -> None:
    config = tiny("train.micro_batch_size=4", "train.global_batch_size=8", "memory=none")
    one = candidates(["fsdp"], 2, language=True)[0]
    counts = model_counts(config)
    every = _variants((config, room(8), 2, one, counts))
    assert [o.words for o in every] == [("parallel=fsdp", f"memory={r.name}") for r in LEANEST_FIRST]
    plans = [o.plan for o in every if o.plan is not None]
    assert [p.config.memory.recompute for p in plans] == list(LEANEST_FIRST)
    assert all(p.fits and p.config.parallel.kind == "fsdp" for p in plans)
    assert [p.peak.host_bytes > 0 for p in plans] == [True, False, False, False]
    sizes = [p.peak_bytes for p in plans]
    assert sizes == sorted(sizes)
    tight = room((sizes[2] + sizes[1]) / 2 / 2**30)
    fits = [o.plan is not None and o.plan.fits for o in _variants((config, tight, 2, one, counts))]
    assert fits == [True, True, False]
    (refused,) = _variants((config, room(1e-3), 2, one, counts))
    assert refused.reason is not None
    assert refused.reason.startswith("0.0 GB of weights, gradients and optimizer state a rank")


def test_an_outcome_that_fits_faster_comes_first_and_one_without_a_plan_last() -> None:
    plan = attempt(tiny("parallel=single"), room(8), 1, ()).plan
    assert plan is not None
    slow = Outcome(("slow",), replace(plan, time=replace(plan.time, step_s=2 * plan.time.step_s)))
    more = Outcome(("more a step",), replace(plan, units=4 * plan.units))
    fast = Outcome(("fast",), plan)
    large = Outcome(("large",), replace(plan, hardware=room(1e-6), peak=replace(plan.peak, bytes=10**9)))
    small = Outcome(("small",), replace(plan, hardware=room(1e-6)))
    none = Outcome(("none",), reason="no")
    ranked = sorted([none, large, slow, small, fast, more], key=_rank)
    assert [o.words[0] for o in ranked] == ["more a step", "fast", "slow", "small", "large", "none"]


def test_what_cannot_be_planned_is_an_outcome_too() -> None:
    outcome = attempt(tiny("parallel=fsdp", "train.global_batch_size=3"), room(8), 2, ("parallel=fsdp",))
    assert outcome.plan is None
    assert outcome.reason is not None
    assert "train.global_batch_size=3" in outcome.reason
