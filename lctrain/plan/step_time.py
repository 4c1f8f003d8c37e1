"""How long a step takes on a device: a roofline for every operation, and messages over the links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from lctrain.config.hardware import Hardware
from lctrain.config.plan import PlanConfig
from lctrain.plan.cost import Operation

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Message:
    """All messages of one kind in a step. bytes: of the whole message, summed; hidden: beside computation."""

    kind: str
    ranks: int
    hidden: bool
    count: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. matmul_s, attention_s, other_s: computation; hidden_s, exposed_s: messages.

    step_s: computation, exposed messages, and what of the hidden ones is longer than what hides it.
    """

    matmul_s: float
    attention_s: float
    other_s: float
    hidden_s: float
    exposed_s: float
    step_s: float
    flops: float
    messages: list[Message] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        """Without messages."""
        return self.matmul_s + self.attention_s + self.other_s


def step_time(
    operations: Iterable[Operation], hardware: Hardware, plan: PlanConfig, *, accumulation: int, traced: int
) -> StepTime:
    """Add up a traced step of `traced` micro-steps as one of `accumulation`: the first stands for all but the last.

    An operation takes the longer of its arithmetic at peak x efficiency, its memory traffic at bandwidth x
    efficiency and its launch; a message takes its share of bytes over the link plus a latency a hop of a ring.
    """
    seconds: dict[str, float] = defaultdict(float)
    messages: dict[tuple[str, int, bool], list[float]] = {}
    flops = 0.0
    for operation in operations:
        times = _repeats(operation.phase, accumulation=accumulation, traced=traced)
        if operation.collective is not None:
            key = operation.collective, operation.ranks, operation.hidden
            sums = messages.setdefault(key, [0.0, 0.0, 0.0])
            taken = message_s(operation, hardware, plan)
            for place, value in enumerate((1.0, operation.bytes, taken)):
                sums[place] += times * value
            continue
        kind = "attention" if operation.attention else "matmul" if operation.flops else "other"
        seconds[kind] += times * operation_s(operation, hardware, plan)
        flops += times * operation.flops
    found = [Message(*key, *sums) for key, sums in sorted(messages.items())]
    hidden = sum(m.seconds for m in found if m.hidden)
    exposed = sum(m.seconds for m in found if not m.hidden)
    compute = sum(seconds.values())
    step = compute + exposed + max(0.0, hidden - plan.overlap * compute)
    return StepTime(
        seconds["matmul"], seconds["attention"], seconds["other"], hidden, exposed, step, flops, found
    )  # fmt: skip


def operation_s(operation: Operation, hardware: Hardware, plan: PlanConfig) -> float:
    """Seconds of one operation that is no message."""
    memory = operation.bytes / (hardware.bandwidth_tb_s * 1e12 * plan.memory_efficiency)
    arithmetic = 0.0
    if operation.flops:
        peaks = hardware.peak_tflops
        peak = peaks.get(_DTYPES.get(operation.dtype, "fp32")) or max(peaks.values())
        share = plan.attention_efficiency if operation.attention else plan.matmul_efficiency
        arithmetic = operation.flops / (peak * 1e12 * share)
    return max(memory, arithmetic, hardware.launch_us * 1e-6)


def message_s(operation: Operation, hardware: Hardware, plan: PlanConfig) -> float:
    """Seconds of one message in a ring of ranks, over the network when they are on several nodes."""
    n = operation.ranks
    if n <= 1:
        return 0.0
    inside = operation.span <= hardware.devices_per_node
    link = (hardware.link_gb_s if inside else hardware.network_gb_s) * 1e9 * plan.link_efficiency
    share, hops = {
        "all_reduce": (2 * (n - 1) / n, 2 * (n - 1)),
        "all_gather": ((n - 1) / n, n - 1),
        "reduce_scatter": ((n - 1) / n, n - 1),
        "all_to_all": ((n - 1) / n, 1),
    }.get(operation.collective or "", (1.0, 1))
    return operation.bytes * share / link + hops * hardware.latency_us * 1e-6


def _repeats(phase: str, *, accumulation: int, traced: int) -> float:
    """How often a step does what this phase of the trace did."""
    return accumulation - traced + 1 if phase.endswith(" 1") and traced > 1 else 1
