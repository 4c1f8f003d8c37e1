"""A plan in words: numbers that a person reads are those of the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.hardware import GIB, load_hardware
from lctrain.plan.layouts import Outcome
from lctrain.plan.memory import CATEGORIES
from lctrain.plan.plan import ASSUMPTIONS, Plan, make_plan
from lctrain.plan.report import lines, one_line, table, verdict


@lru_cache
def tiny() -> Plan:
    """The demo on two cards."""
    config = compose_config(
        [
            "recipe=llama_tiny_32k",
            "data.max_length=2048",
            "plan.price_per_hour=2",
            "plan.dataset_size=1e12",
            "parallel=fsdp",
            "precision=bf16",
        ]
    )
    return make_plan(config, load_hardware("ascend910b3"), 2)[0]


@lru_cache
def images() -> Plan:
    """ResNet-8 with accumulation."""
    config = compose_config(["recipe=resnet8_fashion_mnist", "train.micro_batch_size=16"])
    return make_plan(config, load_hardware("a100"), 2)[0]


def sized(usable_gib: float) -> Plan:
    """The demo on a card with so much room."""
    return replace(tiny(), hardware=replace(tiny().hardware, usable_gib=usable_gib))


def test_the_report_names_the_job_its_memory_its_time_and_the_verdict() -> None:
    plan = tiny()
    text = list(lines(plan))
    assert text[0].startswith(
        "llama_tiny_32k: 0.00B parameters, parallel=fsdp (dp_shard 2), memory=full, precision bf16"
    )
    assert text[0].endswith("on 2 x Ascend 910B3; traced")
    assert text[1] == "batch: 2 a step = 1 x 2 data ranks x 1 micro-steps, sequences of 2,048 tokens, one document each"
    assert text[-1] == verdict(plan)
    whole = "\n".join(text)
    assert f"memory of one rank at its fullest, {plan.peak.place}:" in whole
    assert f"by hand (weights + gradients + master + optimizer): {plan.hand.weights / 1e9:.2f} + " in whole
    assert ", cut in 2: " in whole
    for name in ASSUMPTIONS:
        assert f"plan.{name}={getattr(plan.config.plan, name):g}" in whole
    assert "peak 295 TFLOP/s bf16, 1.6 TB/s, links 196 GB/s each way and 20 us (25 GB/s between nodes)" in whole
    assert "all_gather over 2 ranks" in whole


def test_rows_of_memory_are_those_of_a_mebibyte_and_more_and_the_total_is_of_all() -> None:
    plan = tiny()
    rows = dict(re.findall(r"^  (\S.*?) {2,}([\d.]+) GiB", "\n".join(lines(plan)), re.M))
    assert rows["communicators' buffers"] == f"{2 * 400 / 1024:.2f}"
    assert rows["device context"] == "0.50"
    assert rows["total"] == f"{plan.peak_bytes / GIB:.2f}"
    assert rows["usable"] == "61.00"
    assert rows["headroom"] == f"{61 - plan.peak_bytes / GIB:.2f}"
    large = [v for v in (plan.peak.by_category | plan.reserve).values() if v >= 2**20]
    assert len(rows) == len(large) + 3


def test_every_kind_of_memory_has_a_name() -> None:
    plan = tiny()
    full = replace(plan, peak=replace(plan.peak, by_category=dict.fromkeys(CATEGORIES, 2**30), host_bytes=3 * 2**30))
    text = "\n".join(lines(full))
    for name in ("activations kept", "logits and loss", "gathered parameters", "master weights (fp32)", "temporary"):
        assert f"  {name}" in text
    assert re.search(r"in host memory +3\.00 GiB", text)


def test_days_and_cost_are_those_of_the_data_set() -> None:
    plan = tiny()
    assert plan.days is not None
    assert plan.days == pytest.approx(1e12 / (2 * 2048 / plan.time.step_s) / 86400)
    assert plan.cost == pytest.approx(2.0 * plan.days * 24 * 2)
    assert f"the whole job {plan.days:.2f} days, costing {plan.cost:,.0f}" in "\n".join(lines(plan))


def test_days_without_a_data_set_are_those_of_the_steps() -> None:
    plan = replace(tiny(), config=replace(tiny().config, plan=replace(tiny().config.plan, dataset_size=None)))
    assert plan.config.train.max_steps == 5
    assert plan.days == pytest.approx(5 * plan.time.step_s / 86400)
    free = replace(plan, config=replace(plan.config, plan=replace(plan.config.plan, price_per_hour=None)))
    assert free.cost is None
    assert "costing" not in "\n".join(lines(free))


def test_mfu_is_the_models_own_work_over_what_the_devices_could() -> None:
    plan = tiny()
    assert plan.mfu == pytest.approx(plan.flops / plan.time.step_s / (2 * 295e12))
    assert f"MFU {100 * plan.mfu:.1f} %" in "\n".join(lines(plan))


def test_the_verdict_turns_at_the_last_byte() -> None:
    exact = tiny().peak_bytes / GIB
    assert sized(exact).fits
    assert verdict(sized(exact)).endswith("tight: fragmentation may take the rest")
    assert not sized(exact * (1 - 1e-6)).fits
    assert verdict(sized(exact * 1.04)).endswith("tight: fragmentation may take the rest")
    assert re.fullmatch(r"fits: [\d.]+ GiB of [\d.]+ GiB", verdict(sized(exact * 1.06)))


def test_a_job_that_does_not_fit_is_told_by_how_much_and_what_next() -> None:
    plan = sized(1.0)
    wanted = plan.peak_bytes / GIB
    assert verdict(plan) == (
        f"does not fit: {wanted:.2f} GiB wanted, {wanted - 1:.2f} GiB too much; "
        "plan.fit=true finds what to change, plan.layouts=all compares layouts"
    )
    assert "(does not fit)" in one_line(plan)


def test_one_line_has_memory_time_and_speed() -> None:
    plan = tiny()
    assert one_line(plan).startswith(f"plan: {plan.peak_bytes / GIB:.2f} GiB of 61.00 GiB a rank (fits), ")
    assert f"{plan.units_per_s:,.0f} tokens/s on Ascend 910B3" in one_line(plan)
    assert "\n" not in one_line(plan)


def test_images_say_what_batch_norm_sees() -> None:
    text = list(lines(images()))
    assert text[1] == (
        "batch: 256 a step = 16 x 2 data ranks x 8 micro-steps, images of 28 x 28, 1,000 classes assumed "
        "(model.classes); BatchNorm sees 16 of a step's 256 at once"
    )
    told = ["recipe=resnet8_fashion_mnist", "train.micro_batch_size=16", "model.classes=10", "bn.statistics=sync"]
    text = list(lines(replace(images(), config=compose_config(told))))
    assert "images of 28 x 28; BatchNorm sees 32 of a step's 256 at once" in text[1]


def test_a_table_has_a_row_for_each_outcome_and_the_reason_of_the_refused() -> None:
    outcomes = [
        Outcome(("parallel=fsdp",), tiny()),
        Outcome(("parallel=ddp", "memory=full"), sized(1.0)),
        Outcome(("parallel=fsdp_tp", "parallel.tp_size=8"), reason="8 does not divide"),
    ]
    head, first, second, third, *rest = table(outcomes, tiny().hardware)
    width = len("parallel=fsdp_tp parallel.tp_size=8")
    assert head.split("  ")[-1].strip() == "least batch"
    assert first[:width].rstrip() == "parallel=fsdp"
    assert first.split()[1] == f"{tiny().peak_bytes / GIB:.2f}"
    assert first.split()[-1] == "2"
    assert second.endswith("  does not fit")
    assert not first.endswith("does not fit")
    assert third == "parallel=fsdp_tp parallel.tp_size=8  no: 8 does not divide"
    assert rest[-1] == "usable on Ascend 910B3: 61.00 GiB"
