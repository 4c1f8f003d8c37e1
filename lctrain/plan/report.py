"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lctrain.config.batch_norm import BnStatistics
from lctrain.config.hardware import GIB, Hardware
from lctrain.config.model import CausalLMConfig
from lctrain.plan.job import ASSUMED_CLASSES
from lctrain.plan.layouts import Outcome
from lctrain.plan.plan import ASSUMPTIONS, Plan

TIGHT = 0.05
_NAMES = {
    "parameters": "parameters",
    "master_weights": "master weights (fp32)",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "gathered_parameters": "gathered parameters",
    "activations": "activations kept",
    "logits_and_loss": "logits and loss",
    "communication": "communication buffers",
    "temporary": "temporary",
    "device_context": "device context",
    "communicators": "communicators' buffers",
    "allocator_rounding": "allocator rounding",
}


def lines(plan: Plan) -> Iterator[str]:
    """Everything a person wants to know of one plan."""
    sizes, config = plan.resolved.sizes, plan.config
    axes = ", ".join(f"{axis} {size}" for axis, size in vars(sizes).items() if size > 1) or "one rank"
    yield (
        f"{config.recipe or 'job'}: {plan.parameters / 1e9:.2f}B parameters, parallel={config.parallel.kind} ({axes}), "
        f"memory={config.memory.recompute.name}, precision {config.precision.kind}, on {sizes.world} x "
        f"{plan.hardware.title}; {plan.how}{' with npu tensors' if plan.traced_on == 'npu' else ''}"
    )
    yield f"batch: {_batch(plan)}"
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _time(plan)
    yield ""
    yield verdict(plan)


def _batch(plan: Plan) -> str:
    config, accumulation = plan.config, plan.resolved.accumulation
    train = config.train
    text = (
        f"{train.global_batch_size:,} a step = {train.micro_batch_size} x {plan.resolved.sizes.data} data ranks x "
        f"{accumulation} micro-steps"
    )
    if isinstance(config.model, CausalLMConfig):
        return f"{text}, sequences of {config.documents.max_length:,} tokens, one document each"
    size = config.images.image_size
    # What BatchNorm takes its statistics over, which accumulation does not widen.
    seen = {
        BnStatistics.ghost: min(config.bn.ghost_size or train.micro_batch_size, train.micro_batch_size),
        BnStatistics.sync: train.micro_batch_size * plan.resolved.sizes.data,
    }.get(config.bn.statistics, train.micro_batch_size)
    assumed = "" if config.image_model.classes else f", {ASSUMED_CLASSES:,} classes assumed (model.classes)"
    return (
        f"{text}, images of {size} x {size}{assumed}; BatchNorm sees {seen:,} of a step's "
        f"{train.global_batch_size:,} at once"
    )


def _memory(plan: Plan) -> Iterator[str]:
    yield f"memory of one rank at its fullest, {plan.peak.place}:"
    for name, value in (plan.peak.by_category | plan.reserve).items():
        if value >= 2**20:
            yield f"  {_NAMES[name]:<26} {_gib(value)}"
    yield f"  {'total':<26} {_gib(plan.peak_bytes)}"
    yield f"  {'usable':<26} {_gib(plan.hardware.usable_bytes)}  of {plan.hardware.memory_gib:g} GB"
    yield f"  {'headroom':<26} {_gib(plan.hardware.usable_bytes - plan.peak_bytes)}"
    if plan.peak.host_bytes:
        yield f"  {'in host memory':<26} {_gib(plan.peak.host_bytes)}"
    hand = plan.hand
    terms = [hand.weights, hand.gradients, hand.master_weights, hand.optimizer_state]
    sums = " + ".join(f"{value / 1e9:.2f}" for value in terms if value)
    what = "weights + gradients + optimizer" if not hand.master_weights else "weights + gradients + master + optimizer"
    state = sum(plan.peak.by_category[n] for n in ("parameters", "master_weights", "gradients", "optimizer_state"))
    cut = sorted(set(hand.shards.values()))
    over = "" if cut == [1] else f", cut in {' or '.join(map(str, cut))}: {hand.per_rank / 1e9:.2f} GB a rank"
    yield f"by hand ({what}): {sums} = {hand.total / 1e9:.2f} GB{over}"
    yield f"of which {plan.how.split()[0]} at the fullest moment: {state / 1e9:.2f} GB"


def _time(plan: Plan) -> Iterator[str]:
    time, config = plan.time, plan.config
    yield (
        f"step: {_seconds(time.step_s)} = matrix products {_seconds(time.matmul_s)} + attention "
        f"{_seconds(time.attention_s)} + the rest {_seconds(time.other_s)} + messages {_seconds(time.exposed_s)}; "
        f"beside computation: messages {_seconds(time.hidden_s)}"
    )
    for message in time.messages:
        if message.ranks > 1:
            yield (
                f"  {message.count:,.0f} x {message.kind} over {message.ranks} ranks, {message.bytes / 1e9:,.2f} GB, "
                f"{_seconds(message.seconds)}{', beside computation' if message.hidden else ''}"
            )
    job = "" if plan.days is None else f"; the whole job {plan.days:.2f} days"
    price = "" if plan.cost is None else f", costing {plan.cost:,.0f}"
    yield f"{plan.units_per_s:,.0f} {plan.unit}/s, MFU {100 * plan.mfu:.1f} %{job}{price}"
    dtype, hardware = config.precision.kind, plan.hardware
    shares = ", ".join(f"plan.{name}={getattr(config.plan, name):g}" for name in ASSUMPTIONS)
    yield (
        f"assumed: peak {hardware.peak_tflops[dtype]:g} TFLOP/s {dtype}, {hardware.bandwidth_tb_s:g} TB/s, links "
        f"{hardware.link_gb_s:g} GB/s each way and {hardware.latency_us:g} us ({hardware.network_gb_s:g} GB/s between "
        f"nodes); {shares}"
    )


def verdict(plan: Plan) -> str:
    """Whether it fits, and what to do next."""
    room = plan.hardware.usable_bytes - plan.peak_bytes
    if not plan.fits:
        return (
            f"does not fit: {_gib(plan.peak_bytes).strip()} wanted, {_gib(-room).strip()} too much; "
            "plan.fit=true finds what to change, plan.layouts=all compares layouts"
        )
    tight = room < TIGHT * plan.hardware.usable_bytes
    note = "; tight: fragmentation may take the rest" if tight else ""
    return f"fits: {_gib(plan.peak_bytes).strip()} of {_gib(plan.hardware.usable_bytes).strip()}{note}"


def one_line(plan: Plan) -> str:
    """What train says when it starts."""
    return (
        f"plan: {_gib(plan.peak_bytes).strip()} of {_gib(plan.hardware.usable_bytes).strip()} a rank "
        f"({'fits' if plan.fits else 'does not fit'}), {_seconds(plan.time.step_s)} a step, "
        f"{plan.units_per_s:,.0f} {plan.unit}/s on {plan.hardware.title}"
    )


def table(outcomes: Sequence[Outcome], hardware: Hardware) -> Iterator[str]:
    """Layouts that fit by speed, those that do not by size, and those that cannot be."""
    width = max(len(" ".join(o.words)) for o in outcomes)
    heads = ("GiB a rank", "s a step", "messages", "a second", "MFU %", "least batch")
    yield f"{'':<{width}}  " + "  ".join(f"{head:>11}" for head in heads)
    for outcome in outcomes:
        words, plan = " ".join(outcome.words), outcome.plan
        if plan is None:
            yield f"{words:<{width}}  no: {outcome.reason}"
            continue
        time = plan.time
        cells = (
            f"{plan.peak_bytes / GIB:.2f}",
            f"{time.step_s:.3g}",
            f"{time.exposed_s:.2f}+{time.hidden_s:.2f}",
            f"{plan.units_per_s:,.0f}",
            f"{100 * plan.mfu:.1f}",
            f"{plan.resolved.sizes.data * plan.config.train.micro_batch_size}",
        )
        yield f"{words:<{width}}  " + "  ".join(f"{c:>11}" for c in cells) + ("" if plan.fits else "  does not fit")
    yield "messages: seconds that computation waits for + seconds beside it; least batch: of one micro-step a rank"
    yield f"usable on {hardware.title}: {hardware.usable_bytes / GIB:.2f} GiB"


def _gib(value: float) -> str:
    return f"{value / GIB:8.2f} GiB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
