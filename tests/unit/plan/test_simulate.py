"""Jobs on fake tensors: every layout's memory adds up, agrees with sums by hand, and moves the way it must."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.hardware import load_hardware
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError, DeviceError
from lctrain.plan.derived import quick_plan
from lctrain.plan.marks import HOST
from lctrain.plan.memory import CATEGORIES, stacked
from lctrain.plan.plan import Plan, make_plan
from lctrain.plan.simulate import Simulation

STATE = ("parameters", "master_weights", "gradients", "optimizer_state")
WEIGHTS = 434_816  # of llama_tiny_32k: 320 x 128 + 2 x (4 x 128^2 x 3/4 + 3 x 128 x 384 + 2 x 128) + 128
TWO, FOUR = "train.global_batch_size=2", "train.global_batch_size=4"
LAYOUTS = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "hsdp": 4,
    "fsdp_sp": 2,
    "fsdp_cp": 2,
    "fsdp_usp": 4,
    "fsdp_tp": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "zero3_sp": 2,
    "zero3_offload": 2,
}


def tiny(*words: str, length: int = 256) -> TrainConfig:
    """The demo's recipe, short, with DeepSpeed's buckets as small as the model."""
    return compose_config(["recipe=llama_tiny_32k", f"data.max_length={length}", FOUR, *words])


def traced(*words: str, ranks: int = 2, length: int = 256, device: str = "a100") -> tuple[Plan, Simulation]:
    """A job's plan and trace; each once."""
    return _traced(words, ranks, length, device)


@lru_cache
def _traced(words: tuple[str, ...], ranks: int, length: int, device: str) -> tuple[Plan, Simulation]:
    return make_plan(tiny(*words, length=length), load_hardware(device), ranks)


def layout(name: str, device: str = "a100") -> tuple[Plan, Simulation]:
    """A layout's plan on the ranks it needs."""
    bucket = ["parallel.deepspeed.reduce_bucket_size=1000000"] if name.startswith("zero") else []
    return traced(f"parallel={name}", *bucket, ranks=LAYOUTS[name], device=device)


def most(simulation: Simulation) -> dict[str, int]:
    """The most bytes of each category at any time, wherever they lie."""
    return {name: max(values) for name, values in stacked(simulation.events, frozenset({HOST})).items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_state_and_sums_that_add_up(name: str) -> None:
    plan, simulation = layout(name)
    assert plan.resolved.sizes.world == LAYOUTS[name]
    assert sum(plan.peak.by_category.values()) == plan.peak.bytes > 0
    assert set(plan.peak.by_category) == set(CATEGORIES)
    assert min(plan.peak.by_category.values()) >= 0
    record = plan.as_record()
    assert sum(record["breakdown"].values()) == record["peak_bytes"] == plan.peak_bytes
    assert record["tensor_bytes"] == plan.peak.bytes
    held = most(simulation)
    assert held["gradients"] > 0
    assert held["activations"] > 0
    assert held["logits_and_loss"] > 0
    assert held["parameters"] + held["master_weights"] > 0
    # Two moments of 4 bytes a number, over the shards.
    shards = plan.hand.shards["optimizer_state"]
    assert held["optimizer_state"] == pytest.approx(8 * WEIGHTS / shards, rel=0.01)
    assert simulation.parameters == simulation.trained == WEIGHTS
    assert plan.time.step_s > 0
    assert json.dumps(record)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_begins_and_stays_above_nothing(name: str) -> None:
    """What frees what it never took would make every later sum too small."""
    _, simulation = layout(name)
    held = 0
    sizes: dict[int, int] = {}
    for event in simulation.events:
        held += event.delta
        sizes[id(event.block)] = sizes.get(id(event.block), 0) + event.delta
        assert sizes[id(event.block)] >= 0
        assert held >= 0


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "hsdp", "fsdp_sp", "fsdp_cp", "fsdp_usp", "fsdp_tp"])
def test_state_agrees_with_the_hand_arithmetic(name: str) -> None:
    """fp32: 4 bytes of weight, 4 of gradient and 8 of moments; pieces of FSDP2 are padded, and buffers are small."""
    plan, simulation = layout(name)
    held = most(simulation)
    cut = plan.hand.shards["weights"]
    assert cut == plan.resolved.sizes.shards
    assert plan.hand.total == 16 * WEIGHTS
    # Rotary frequencies and a step counter a parameter come on top; norms are whole on every tensor-parallel rank.
    slack = 8 * 1024
    assert 0 <= held["parameters"] - 4 * WEIGHTS / cut <= slack
    assert 0 <= held["optimizer_state"] - 8 * WEIGHTS / cut <= slack
    grown = 2 if name == "ddp" and plan.resolved.accumulation > 1 else 1  # beside those not yet sent, DDP's buckets
    assert 0 <= held["gradients"] / grown - 4 * WEIGHTS / cut <= slack
    assert sum(held[n] for n in STATE) - (grown - 1) * 4 * WEIGHTS == pytest.approx(plan.hand.per_rank, rel=0.01)


def test_ddps_gradients_are_held_once_where_every_backward_sends_them() -> None:
    plan, simulation = traced("parallel=ddp", TWO)
    assert plan.resolved.accumulation == 1
    assert most(simulation)["gradients"] == pytest.approx(4 * WEIGHTS, rel=0.01)


def test_deepspeeds_bucket_is_communication() -> None:
    """A million fp32 numbers that ZeRO-3 holds from its start to its end."""
    _, simulation = layout("zero3")
    series = stacked(simulation.events)["communication"]
    assert min(series[len(series) // 2 :]) >= 4_000_000


def test_mixed_precision_keeps_master_weights() -> None:
    plan, simulation = traced("parallel=fsdp", "precision=bf16")
    assert plan.hand.master_weights == 4 * WEIGHTS
    held = most(simulation)
    assert held["master_weights"] == pytest.approx(4 * WEIGHTS / 2, rel=0.01)
    assert plan.peak.by_category["optimizer_state"] == pytest.approx(8 * WEIGHTS / 2, rel=0.01)


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_a_longer_sequence_is_never_smaller(name: str) -> None:
    short, long = (traced(f"parallel={name}", TWO, length=length)[0] for length in (256, 768))
    assert long.peak.bytes > short.peak.bytes
    assert long.peak_bytes > short.peak_bytes
    assert long.peak.by_category["activations"] > short.peak.by_category["activations"]
    assert long.time.step_s > short.time.step_s
    assert long.flops > 3 * short.flops  # attention grows with the square


def test_more_ranks_never_hold_more_of_sharded_state() -> None:
    held = [most(traced("parallel=fsdp", ranks=ranks)[1]) for ranks in (1, 2, 4)]
    for few, many in pairwise(held):
        for name in ("parameters", "gradients", "optimizer_state"):
            assert many[name] < few[name]
        assert sum(many[n] for n in STATE) == pytest.approx(sum(few[n] for n in STATE) / 2, rel=0.01)


def test_more_ranks_hold_all_of_replicated_state() -> None:
    two, four = most(layout("ddp")[1]), most(traced("parallel=ddp", ranks=4)[1])
    assert [two[n] for n in ("parameters", "optimizer_state")] == [four[n] for n in ("parameters", "optimizer_state")]


def test_recomputation_trades_activations_for_arithmetic() -> None:
    found = [traced("parallel=fsdp", TWO, f"memory={m}") for m in ("none", "selective", "full")]
    kept = [most(simulation)["activations"] for _, simulation in found]
    computed = [plan.time.flops for plan, _ in found]
    assert kept[0] > kept[1] > kept[2]
    assert computed[0] < computed[1] < computed[2]
    assert len({plan.flops for plan, _ in found}) == 1  # the model's own, whatever is done twice


def test_fused_operators_keep_less_and_move_less() -> None:
    """They are counted on tensors of any device; tests/npu_emulation compares that with torch_npu's own."""
    words = ("recipe=llama_tiny_32k", "parallel=single", "data.max_length=4096", "memory=none")
    found = []
    for fused in ("false", "true"):
        config = compose_config([*words, f"model.npu_fused={fused}"])
        found.append(make_plan(config, load_hardware("ascend910b3"), 1)[0])
    plain, fused_plan = found
    activations = [plan.peak.by_category["activations"] for plan in found]
    # The plain norm keeps its normalised input too, the plain MLP silu's output.
    assert 0.6 < activations[1] / activations[0] < 0.9
    assert fused_plan.time.other_s < plain.time.other_s
    assert fused_plan.time.matmul_s == pytest.approx(plain.time.matmul_s)
    config = compose_config([*words, "model.npu_fused=true"])
    with pytest.raises(DeviceError, match=r"model\.npu_fused=true but the device is cuda"):
        make_plan(config, load_hardware("a100"), 1)


def test_a_split_sequence_keeps_fewer_activations_a_rank() -> None:
    whole, split = (most(traced(f"parallel={n}", TWO, length=768)[1]) for n in ("fsdp", "fsdp_sp"))
    assert split["activations"] == pytest.approx(whole["activations"] / 2, rel=0.1)


@pytest.mark.parametrize(
    ("words", "moved"),
    [
        (("parallel=fsdp", "parallel.offload_params=true"), ("parameters", "gradients", "optimizer_state")),
        (
            ("parallel=zero3_offload", "parallel.deepspeed.reduce_bucket_size=1000000"),
            ("parameters", "master_weights", "gradients", "optimizer_state"),
        ),
    ],
    ids=["fsdp", "zero3_offload"],
)
def test_offloaded_state_is_host_memory_of_an_accelerator_and_plain_memory_of_a_cpu(
    words: tuple[str, ...], moved: tuple[str, ...]
) -> None:
    there, simulation = traced(*words)
    here, _ = traced(*words, device="cpu")
    held = most(simulation)
    assert all(there.peak.by_category[name] == 0 for name in moved)
    assert here.peak.host_bytes == 0
    assert here.peak.by_category["optimizer_state"] == pytest.approx(8 * WEIGHTS / 2, rel=0.01)
    assert max(held[n] for n in moved) < there.peak.host_bytes <= sum(held[n] for n in moved)
    assert there.peak.host_bytes == pytest.approx(there.hand.per_rank, rel=0.3)


def test_offloaded_layer_inputs_are_host_memory_of_an_accelerator() -> None:
    """Two layers of 256 tokens x 128 numbers of 4 bytes."""
    there, _ = traced("parallel=ddp", TWO, "memory=offload")
    here, _ = traced("parallel=ddp", TWO, "memory=offload", device="cpu")
    assert there.peak.host_bytes == 2 * 256 * 128 * 4
    assert here.peak.host_bytes == 0


def test_messages_of_a_layout_are_those_it_sends() -> None:
    """FSDP gathers weights twice and scatters gradients once a micro-step; Ulysses adds exchanges of heads."""
    plan, _ = traced("parallel=fsdp", TWO)
    by_kind = {m.kind: m for m in plan.time.messages if m.ranks == 2 and m.hidden}
    assert by_kind["reduce_scatter"].bytes == pytest.approx(4 * WEIGHTS, rel=0.01)
    assert 4 * WEIGHTS <= by_kind["all_gather"].bytes <= 2 * 4 * WEIGHTS * 1.01
    ulysses, _ = traced("parallel=fsdp_sp", TWO)
    exchanges = [m for m in ulysses.time.messages if m.kind == "all_to_all"]
    assert exchanges
    assert not any(m.hidden for m in exchanges)
    assert not [m for m in plan.time.messages if m.kind == "all_to_all"]
    reduced, _ = traced("parallel=ddp", TWO)
    sums = sum(m.bytes for m in reduced.time.messages if m.kind == "all_reduce" and m.hidden)
    assert sums == pytest.approx(4 * WEIGHTS, rel=0.01)


def test_accumulation_repeats_the_first_micro_step() -> None:
    once, twice, often = (traced("parallel=single", f"train.global_batch_size={n}", ranks=1)[0] for n in (1, 2, 8))
    assert [p.resolved.accumulation for p in (once, twice, often)] == [1, 2, 8]
    assert [p.time.flops / once.time.flops for p in (twice, often)] == pytest.approx([2, 8])
    assert often.peak.bytes == twice.peak.bytes
    assert often.units == 8 * once.units


@pytest.mark.parametrize("words", [(), (TWO, "precision=bf16", "memory=none")], ids=["full", "none, bf16"])
def test_a_derived_plan_is_the_full_trace(words: tuple[str, ...]) -> None:
    """Eight layers from four and six."""
    config = tiny("parallel=fsdp", "model.architecture.num_hidden_layers=8", *words, length=512)
    hardware = load_hardware("a100")
    derived, (full, _) = quick_plan(config, hardware, 2), make_plan(config, hardware, 2)
    assert derived.how == "derived from traces of 4 and 6 layers"
    assert full.how == "traced"

    def close(value: Any) -> Any:
        return pytest.approx(value, rel=1e-6)

    assert derived.peak.bytes == close(full.peak.bytes)
    assert derived.peak_bytes == close(full.peak_bytes)
    for name in CATEGORIES:
        assert derived.peak.by_category[name] == pytest.approx(full.peak.by_category[name], rel=1e-6, abs=1), name
    for name in ("matmul_s", "attention_s", "other_s", "hidden_s", "exposed_s", "step_s", "flops"):
        assert getattr(derived.time, name) == close(getattr(full.time, name)), name
    for one, other in zip(derived.time.messages, full.time.messages, strict=True):
        assert (one.kind, one.ranks, one.hidden) == (other.kind, other.ranks, other.hidden)
        assert (one.count, one.bytes, one.seconds) == close((other.count, other.bytes, other.seconds))
    assert (derived.parameters, derived.hand) == (full.parameters, full.hand)
    assert (derived.flops, derived.units) == close((full.flops, full.units))


def test_a_shallow_model_is_traced() -> None:
    assert quick_plan(tiny("parallel=single"), load_hardware("a100"), 1).how == "traced"


def image(*words: str, ranks: int = 2, device: str = "a100") -> tuple[Plan, Simulation]:
    """An image recipe's plan."""
    return make_plan(compose_config(["data.source=unread", *words]), load_hardware(device), ranks)


def test_resnet8_plans() -> None:
    plan, simulation = image("recipe=resnet8_fashion_mnist")
    assert (plan.unit, plan.units) == ("samples", 256)
    assert sum(plan.peak.by_category.values()) == plan.peak.bytes
    held = most(simulation)
    # SGD with momentum: 4 bytes each of weight, gradient and momentum.
    for name in ("parameters", "gradients", "optimizer_state"):
        assert held[name] == pytest.approx(4 * simulation.parameters, rel=0.01)
    assert plan.peak.by_category["activations"] > 5 * held["parameters"]


def resnet50(precision: str, micro: int, total: int) -> tuple[Plan, Simulation]:
    """ResNet-50 under DDP on two ranks."""
    return image(
        "recipe=resnet50_imagenet",
        f"precision={precision}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={total}",
    )


def test_resnet50_plans_in_both_precisions() -> None:
    """Twice the images in half the bytes."""
    (full, of_full), (half, of_half) = resnet50("fp32", 4, 8), resnet50("bf16", 8, 16)
    assert of_full.parameters == of_half.parameters == 25_557_032
    assert half.peak.by_category["activations"] == pytest.approx(full.peak.by_category["activations"], rel=0.05)
    assert full.peak.by_category["master_weights"] == 0
    assert half.peak.by_category["master_weights"] == 4 * 25_557_032
    # 4.1 billion multiply-adds an image, and two such passes more backward.
    assert full.flops == pytest.approx(8 * 3 * 2 * 4.1e9, rel=0.03)
    assert half.flops == pytest.approx(2 * full.flops)


def test_a_process_with_a_group_of_its_own_is_not_planned_in() -> None:
    """The fake group would take its place."""
    import torch.distributed as dist

    before = dict(os.environ)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(ValueError, match="twice"):
            make_plan(tiny("parallel=fsdp"), load_hardware("a100"), 2)
    finally:
        dist.destroy_process_group()
    assert os.environ == before, "what comes next would take itself for a rank"


def test_a_deepspeed_plan_does_not_choose_the_device_of_later_processes() -> None:
    before = os.environ.get("DS_ACCELERATOR")
    make_plan(tiny("parallel=zero3"), load_hardware("a100"), 2)
    assert os.environ.get("DS_ACCELERATOR") == before


def test_what_cannot_run_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch_size=4 is not a multiple of .* 8 data ranks"):
        make_plan(tiny("parallel=fsdp"), load_hardware("a100"), 8)
    with pytest.raises(ConfigError, match=r"parallel\.sp_size=3 does not divide the model's 4 attention heads"):
        make_plan(tiny("parallel=fsdp_sp"), load_hardware("a100"), 3)
