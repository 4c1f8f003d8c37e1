"""What a trace sees of small real tensors: memory as it comes and goes, and nothing of views."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lctrain.plan.cost import Operation
from lctrain.plan.memory import find_peak
from lctrain.plan.trace import Trace


def deltas(trace: Trace) -> list[int]:
    """Changes of bytes in order."""
    return [event.delta for event in trace.events]


def test_memory_comes_and_goes_with_tensors() -> None:
    with Trace() as trace:
        x = torch.ones(100)
        assert trace.bytes == 400
        y = torch.ones(10, dtype=torch.float64)
        assert trace.bytes == 480
        del x
        assert trace.bytes == 80
        del y
        assert trace.bytes == 0
    assert deltas(trace) == [400, 80, -400, -80]


def test_views_hold_memory_and_cost_none() -> None:
    with Trace() as trace:
        x = torch.ones(6, 4)
        part = x.t()[1:].reshape(-1)  # a copy: rows of the transpose are not contiguous
        assert trace.bytes == 96 + 72
        view = x[2:].view(4, 4)
        assert trace.bytes == 96 + 72
        del x
        assert trace.bytes == 96 + 72  # the view keeps all of it
        del view
        assert trace.bytes == 72
        del part
    assert deltas(trace) == [96, 72, -96, -72]


def test_operations_in_place_hold_nothing_new() -> None:
    with Trace() as trace:
        x = torch.ones(10)
        x += 1
        x.mul_(2)
    assert deltas(trace) == [40]


def test_memory_taken_and_returned_inside_a_program_is_the_peak() -> None:
    with Trace() as trace:
        x = torch.ones(1000)
        y = (x * 2 + 1).sum()  # x, its double and the sum of both at once
        del x, y
    assert find_peak(trace.events).bytes == 3 * 4000


def test_what_autograd_keeps_is_held_until_the_backward() -> None:
    weight = torch.ones(50, requires_grad=True)
    with Trace() as trace:
        trace.enter("forward 1")
        loss = (weight.exp() * 1.0).sum()
        kept = trace.bytes
        trace.enter("backward 1")
        loss.backward()
        del loss
    assert kept >= 200  # exp keeps its own result
    by_category = find_peak(trace.events).by_category
    assert by_category["activations"] >= 200
    assert weight.grad is not None
    assert trace.bytes == 200  # the gradient, which the trace saw made


def test_resizing_a_storage_is_seen_and_makes_it_a_gathered_parameter() -> None:
    with Trace() as trace:
        x = torch.zeros(25)
        x.untyped_storage().resize_(0)
        assert trace.bytes == 0
        x.untyped_storage().resize_(100)
        assert trace.bytes == 100
        x.untyped_storage().resize_(40)
        assert trace.bytes == 40
        peak = find_peak(trace.events)
        del x
        assert trace.bytes == 0
    assert deltas(trace) == [100, -100, 100, -60, -40]
    assert peak.by_category["gathered_parameters"] == peak.bytes == 100


def test_resizing_what_the_trace_never_saw_is_not_its_business() -> None:
    before = torch.zeros(10)
    with Trace() as trace:
        before.untyped_storage().resize_(0)
        before.untyped_storage().resize_(40)
    assert trace.events == []


def test_a_tensor_from_outside_counts_when_an_operation_writes_to_it() -> None:
    """Only what operations give is seen, and what they write in place they give."""
    outside = torch.zeros(10)
    with Trace() as trace:
        outside + 1
        assert trace.bytes == 0
        outside.add_(1)
        assert trace.bytes == 40


def test_phases_and_places_are_what_was_said() -> None:
    with Trace() as trace:
        first = torch.ones(1)
        trace.enter("forward 1", "forward 1, layer 2 of 3")
        second = torch.ones(1)
        trace.enter("backward 1")
        del second
        del first
    assert [(e.phase, e.place) for e in trace.events] == [
        ("build", "build"),
        ("forward 1", "forward 1, layer 2 of 3"),
        ("backward 1", "backward 1"),
        ("backward 1", "backward 1"),
    ]


def test_restart_keeps_what_is_held_as_the_start() -> None:
    with Trace() as trace:
        kept = torch.ones(10)
        gone = torch.ones(20)
        del gone
        trace.restart()
        assert trace.operations == []
        assert [(e.delta, e.phase) for e in trace.events] == [(40, "start")]
        trace.enter("forward 1")
        kept + 1
    assert deltas(trace) == [40, 40, -40]
    assert find_peak(trace.events).bytes == 80


def test_marks_say_what_a_block_is_for_and_the_last_one_counts() -> None:
    with Trace() as trace:
        x = torch.ones(10)
        trace.mark(x, "parameters")
        trace.mark(x[2:5], "gradients")  # the same storage
        trace.mark(torch.ones(3).detach(), "optimizer_state")  # dies at once
        unseen = torch.empty(0)
    trace.mark(unseen, "parameters")
    peak = find_peak(trace.events[:1])
    assert peak.by_category["gradients"] == 40


def test_a_half_copy_of_master_weights_is_parameters() -> None:
    with Trace() as trace:
        master = torch.ones(8)
        trace.mark(master, "master_weights")
        half = master.to(torch.bfloat16)
        other = torch.ones(8).to(torch.bfloat16)
    peak = find_peak(trace.events)
    assert peak.by_category["parameters"] == half.nbytes
    assert peak.by_category["master_weights"] == master.nbytes
    assert other.nbytes == 16


def test_matrices_of_the_vocabularys_width_in_a_forward_pass_are_logits() -> None:
    with Trace() as trace:
        trace.vocabulary = frozenset({97})
        trace.enter("forward 1")
        logits, narrow = torch.ones(4, 97), torch.ones(4, 96)
        trace.enter("backward 1")
        gradient = torch.ones(4, 97)
    hints = [event.block.hint for event in trace.events]
    assert hints == ["logits_and_loss", None, None]
    assert logits.shape == gradient.shape != narrow.shape


def test_what_is_counted_as_something_else_is_not_counted_itself() -> None:
    named = Operation("forward 1", flops=7.0)
    with Trace() as trace:
        a, b = torch.ones(4, 4), torch.ones(4, 4)
        trace.operations.clear()
        with trace.counted_as(named):
            with trace.counted_as(Operation("forward 1", flops=9.0)):
                c = a @ b
            c = c @ b
        with trace.counted_as(None):
            c = c @ b
        assert trace.operations == [named]
        c @ b
    assert [o.flops for o in trace.operations] == [7.0, 128.0]


def test_fake_tensors_have_sizes_and_answers() -> None:
    with FakeTensorMode(), Trace() as trace:
        x = torch.ones(1 << 20, 1 << 10)  # 4 GiB that are nowhere
        assert trace.bytes == 1 << 32
        total = x.sum()
        assert total.item() == 0.0
        assert not bool(total)
        assert torch.equal(x, x)
        assert torch.allclose(x, x)
    assert find_peak(trace.events).bytes == (1 << 32) + 4


def test_meta_tensors_hold_nothing() -> None:
    with Trace() as trace:
        torch.ones(1000, device="meta")
    assert trace.events == []


def test_nothing_stays_patched() -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
    with Trace() as trace:
        assert torch.UntypedStorage.resize_ is not before[0]
        assert ShardingPropagator._propagate_tensor_meta_non_cached is not before[1]
        try:
            with Trace():
                raise ValueError
        except ValueError:
            pass
        assert torch.UntypedStorage.resize_ is not before[0]
    assert (torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached) == before
    torch.ones(4)
    assert trace.events == []
