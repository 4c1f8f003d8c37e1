"""What operations cost, and what a step of them lasts, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lctrain.config.hardware import Hardware
from lctrain.config.plan import PlanConfig
from lctrain.plan.cost import Operation, cost_of
from lctrain.plan.step_time import Message, message_s, operation_s, step_time
from lctrain.plan.trace import Trace

aten = torch.ops.aten

# Peaks, bandwidth and links of round numbers, so that sums are exact: 1e12 operations, 1e11 bytes, 1e9 bytes a second.
DEVICE = Hardware(
    name="round",
    title="Round",
    type="cuda",
    memory_gib=1,
    usable_gib=1,
    peak_tflops={"fp32": 1.0, "bf16": 4.0},
    bandwidth_tb_s=0.1,
    link_gb_s=1.0,
    network_gb_s=0.25,
    devices_per_node=4,
    latency_us=0.0,
)
PERFECT = PlanConfig(
    matmul_efficiency=1.0, attention_efficiency=1.0, memory_efficiency=1.0, link_efficiency=1.0, overlap=1.0
)


def cost(func: Any, *args: Any) -> Operation | None:
    """The cost of one call on real tensors."""
    out = func(*args)
    inputs = [x for x in args if isinstance(x, torch.Tensor)]
    made = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
    return cost_of(func, args, out, inputs, made, "forward 1")


def test_a_matrix_product() -> None:
    found = cost(aten.mm.default, torch.zeros(3, 5), torch.zeros(5, 7))
    assert found is not None
    assert found.flops == 2 * 3 * 5 * 7
    assert found.bytes == 4 * (3 * 5 + 5 * 7 + 3 * 7)
    assert (found.phase, found.dtype, found.collective) == ("forward 1", torch.float32, None)


def test_a_product_in_bf16_moves_half_the_bytes() -> None:
    half = cost(aten.mm.default, torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4, dtype=torch.bfloat16))
    assert half is not None
    assert (half.flops, half.bytes, half.dtype) == (128.0, 96.0, torch.bfloat16)


def test_a_batch_of_products() -> None:
    found = cost(aten.bmm.default, torch.zeros(2, 3, 5), torch.zeros(2, 5, 7))
    assert found is not None
    assert found.flops == 2 * 2 * 3 * 5 * 7


def test_a_convolution() -> None:
    """Eight 6 x 6 outputs of 3 x 3 x 4 products each, of two images."""
    image, weight = torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3)
    found = cost(aten.convolution.default, image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert found is not None
    assert found.flops == 2 * (2 * 8 * 6 * 6) * (4 * 3 * 3)
    assert found.bytes == 4 * (image.numel() + weight.numel() + 2 * 8 * 6 * 6)


def test_an_elementwise_operation_only_moves() -> None:
    found = cost(aten.add.Tensor, torch.zeros(10), torch.zeros(10))
    assert found is not None
    assert (found.flops, found.bytes) == (0.0, 3 * 40)


def test_an_operation_in_place_counts_its_memory_once() -> None:
    x = torch.zeros(10)
    found = cost(aten.add_.Tensor, x, torch.zeros(10))
    assert found is not None
    assert found.bytes == 2 * 40


def test_an_expanded_tensor_is_read_where_it_is() -> None:
    found = cost(aten.add.Tensor, torch.zeros(10, 10), torch.zeros(10, 1).expand(10, 10))
    assert found is not None
    assert found.bytes == 400 + 40 + 400


@pytest.mark.parametrize(
    "make",
    [
        lambda: cost(aten.empty.memory_format, [4, 4]),
        lambda: cost(aten.empty_like.default, torch.zeros(4)),
        lambda: cost(aten.detach.default, torch.zeros(4)),
        lambda: cost_of(aten.mm.default, (), None, [], [], "forward 1"),
    ],
)
def test_what_computes_nothing_costs_nothing(make: Any) -> None:
    assert make() is None


def test_views_and_slices_are_no_operations_of_a_trace() -> None:
    with Trace() as trace:
        x = torch.ones(4, 6)
        before = len(trace.operations)
        x.view(24)
        x.t()
        x[1:]
        x.expand(2, 4, 6)
        assert len(trace.operations) == before
        x + 1
        assert len(trace.operations) == before + 1


# step_time


def compute(flops: float = 0.0, moved: float = 0.0, phase: str = "forward 1", **more: Any) -> Operation:
    """An operation that is no message."""
    return Operation(phase, flops, moved, **more)


def message(kind: str, moved: float, ranks: int, *, hidden: bool = False, phase: str = "backward 1") -> Operation:
    """A message among neighbours."""
    return Operation(phase, bytes=moved, collective=kind, ranks=ranks, span=ranks, hidden=hidden)


def test_an_operation_takes_the_longer_of_its_two_sides() -> None:
    assert operation_s(compute(2e12, 1e11), DEVICE, PERFECT) == pytest.approx(2.0)
    assert operation_s(compute(1e12, 3e11), DEVICE, PERFECT) == pytest.approx(3.0)
    assert operation_s(compute(4e12, dtype=torch.bfloat16), DEVICE, PERFECT) == pytest.approx(1.0)
    # A dtype that is no floating-point one computes as fp32.
    assert operation_s(compute(1e12, dtype=torch.int64), DEVICE, PERFECT) == pytest.approx(1.0)
    assert operation_s(compute(1.0, 1.0), replace(DEVICE, launch_us=5.0), PERFECT) == pytest.approx(5e-6)


def test_efficiencies_are_shares_of_what_they_name() -> None:
    plan = replace(PERFECT, matmul_efficiency=0.5, attention_efficiency=0.25, memory_efficiency=0.1)
    assert operation_s(compute(1e12), DEVICE, plan) == pytest.approx(2.0)
    assert operation_s(compute(1e12, attention=True), DEVICE, plan) == pytest.approx(4.0)
    assert operation_s(compute(0.0, 1e11), DEVICE, plan) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("kind", "share", "hops"),
    [
        ("all_reduce", 2 * 3 / 4, 6),
        ("all_gather", 3 / 4, 3),
        ("reduce_scatter", 3 / 4, 3),
        ("all_to_all", 3 / 4, 1),
        ("send", 1.0, 1),
        ("broadcast", 1.0, 1),
    ],
)
def test_a_message_takes_its_share_of_bytes_and_its_hops(kind: str, share: float, hops: int) -> None:
    device = replace(DEVICE, latency_us=1000.0)
    assert message_s(message(kind, 1e9, 4), device, PERFECT) == pytest.approx(share + hops * 1e-3)
    half = replace(PERFECT, link_efficiency=0.5)
    assert message_s(message(kind, 1e9, 4), DEVICE, half) == pytest.approx(2 * share)
    assert message_s(message(kind, 1e9, 1), device, PERFECT) == 0.0


def test_beyond_a_node_the_network_carries_it() -> None:
    near = replace(message("send", 1e9, 2), span=4)
    assert message_s(near, DEVICE, PERFECT) == pytest.approx(1.0)
    # Two ranks of two nodes: few, and still far apart.
    assert message_s(replace(near, span=5), DEVICE, PERFECT) == pytest.approx(4.0)


def test_a_step_is_its_operations() -> None:
    found = step_time(
        [
            compute(1e12),
            compute(2e12, attention=True),
            compute(0.0, 4e11),
            message("all_to_all", 1e9, 2),
            message("all_to_all", 3e9, 2),
        ],
        DEVICE,
        PERFECT,
        accumulation=1,
        traced=1,
    )
    assert (found.matmul_s, found.attention_s, found.other_s) == pytest.approx((1.0, 2.0, 4.0))
    assert found.compute_s == pytest.approx(7.0)
    assert (found.exposed_s, found.hidden_s) == pytest.approx((2.0, 0.0))
    assert found.step_s == pytest.approx(9.0)
    assert found.flops == 3e12
    assert found.messages == [Message("all_to_all", 2, False, 2.0, 4e9, 2.0)]


@pytest.mark.parametrize(("overlap", "late"), [(1.0, 0.0), (0.5, 2.0), (0.0, 4.0)])
def test_hidden_messages_cost_what_computation_does_not_hide(overlap: float, late: float) -> None:
    """Four seconds of messages beside four of computation."""
    operations = [compute(4e12), message("all_gather", 8e9, 2, hidden=True), message("all_reduce", 1e9, 2)]
    found = step_time(operations, DEVICE, replace(PERFECT, overlap=overlap), accumulation=1, traced=1)
    assert (found.hidden_s, found.exposed_s) == pytest.approx((4.0, 1.0))
    assert found.step_s == pytest.approx(4.0 + 1.0 + late)


@pytest.mark.parametrize(("accumulation", "first"), [(2, 1), (3, 2), (8, 7)])
def test_the_first_micro_step_stands_for_all_but_the_last(accumulation: int, first: int) -> None:
    operations = [
        compute(1e12, phase="forward 1"),
        compute(1e12, phase="backward 1"),
        compute(10e12, phase="forward 2"),
        compute(0.0, 1e13, phase="optimizer"),
        message("all_reduce", 1e9, 2, phase="backward 1"),
        message("all_reduce", 5e9, 2, phase="backward 2"),
    ]
    found = step_time(operations, DEVICE, PERFECT, accumulation=accumulation, traced=2)
    assert found.matmul_s == pytest.approx(2 * first + 10)
    assert found.other_s == pytest.approx(100.0)
    assert found.flops == pytest.approx((2 * first + 10) * 1e12)
    assert found.messages[0].count == first + 1
    assert found.messages[0].bytes == pytest.approx(1e9 * first + 5e9)
    assert found.step_s == pytest.approx(2 * first + 10 + 100 + first + 5)


def test_one_micro_step_is_not_repeated() -> None:
    found = step_time([compute(1e12, phase="forward 1")], DEVICE, PERFECT, accumulation=1, traced=1)
    assert found.matmul_s == pytest.approx(1.0)


def test_messages_are_told_apart_by_kind_ranks_and_whether_they_hide() -> None:
    operations = [
        message("all_gather", 1e9, 2, hidden=True),
        message("all_gather", 1e9, 2),
        message("all_gather", 1e9, 4),
        message("all_reduce", 1e9, 2),
    ]
    found = step_time(operations, DEVICE, PERFECT, accumulation=1, traced=1)
    assert [(m.kind, m.ranks, m.hidden) for m in found.messages] == [
        ("all_gather", 2, False),
        ("all_gather", 2, True),
        ("all_gather", 4, False),
        ("all_reduce", 2, False),
    ]
    assert sum(m.seconds for m in found.messages) == pytest.approx(found.hidden_s + found.exposed_s)
