"""A plan of a deep model from traces of two shallow ones, for comparing many layouts.

Decoder layers are alike, so every byte and every second of a step is a constant plus a multiple of their number. A
step's fullest moment moves with depth only between a few regions (the ends of each pass, the update); each region's
own peak is carried on, and the highest taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace

from lctrain.config.hardware import Hardware
from lctrain.config.language_checks import architecture, with_layers
from lctrain.config.model import CausalLMConfig
from lctrain.config.parallel import ZeroConfig
from lctrain.config.root import TrainConfig
from lctrain.plan.memory import CATEGORIES, Peak, region_peaks
from lctrain.plan.plan import Plan, assemble, make_plan
from lctrain.plan.simulate import Simulation, simulate
from lctrain.plan.step_time import Message, StepTime, step_time

SHALLOW = (4, 6)


def quick_plan(config: TrainConfig, hardware: Hardware, ranks: int) -> Plan:
    """Derived where the model is deep and its layers are alike, else traced. Raises ConfigError, ModelError."""
    depth = _depth(config)
    if depth is None or depth <= SHALLOW[1]:
        return make_plan(config, hardware, ranks)[0]
    simulations = [simulate(with_layers(config, n), hardware, ranks) for n in SHALLOW]
    carry = _carry(depth)
    peak = _peak(simulations, hardware, carry)
    times = [
        step_time(s.operations, hardware, config.plan, accumulation=s.resolved.accumulation, traced=s.micro_steps)
        for s in simulations
    ]
    low, high = simulations
    return assemble(
        config,
        hardware,
        replace(high, resolved=replace(high.resolved, config=config)),
        peak,
        _time(times[0], times[1], carry, config),
        parameters=int(carry(low.parameters, high.parameters)),
        trained=int(carry(low.trained, high.trained)),
        flops=carry(low.flops, high.flops),
        how=f"derived from traces of {SHALLOW[0]} and {SHALLOW[1]} layers",
    )


Carry = Callable[[float, float], float]


def _carry(depth: int) -> Carry:
    low, high = SHALLOW
    return lambda a, b: a + (b - a) * (depth - low) / (high - low)


def _depth(config: TrainConfig) -> int | None:
    """Layers of a model whose layers are alike; None for others."""
    if not isinstance(config.model, CausalLMConfig) or isinstance(config.parallel, ZeroConfig):
        return None  # DeepSpeed's buckets fill up at their own pace
    raw = architecture(config)
    depth, kinds = raw.get("num_hidden_layers"), raw.get("layer_types") or []
    uneven = len(set(kinds)) > 1 or any(raw.get(key) for key in _UNEVEN)
    return depth if isinstance(depth, int) and not uneven else None


_UNEVEN = (
    "first_k_dense_replace",
    "mlp_only_layers",
    "decoder_sparse_step",
    "sliding_window_pattern",
    "moe_layer_freq",
)
"""Fields of Hugging Face configs that make some layers unlike others."""


def _peak(simulations: list[Simulation], hardware: Hardware, carry: Carry) -> Peak:
    low, high = (region_peaks(s.events, on_host=s.on_host, rounding=hardware.rounding) for s in simulations)
    carried = [_carry_peak(low[region], high[region], carry) for region in low.keys() & high.keys()]
    highest = max(carried, key=lambda p: p.bytes)
    return replace(highest, host_bytes=max(p.host_bytes for p in carried))


def _carry_peak(a: Peak, b: Peak, carry: Carry) -> Peak:
    return Peak(
        bytes=int(carry(a.bytes, b.bytes)),
        by_category={name: max(0, int(carry(a.by_category[name], b.by_category[name]))) for name in CATEGORIES},
        host_bytes=int(carry(a.host_bytes, b.host_bytes)),
        place=re.sub(r", layer.*", "", b.place),
        rounding=int(carry(a.rounding, b.rounding)),
    )


def _time(a: StepTime, b: StepTime, carry: Carry, config: TrainConfig) -> StepTime:
    messages = [
        Message(
            m.kind, m.ranks, m.hidden, *(carry(getattr(n, f), getattr(m, f)) for f in ("count", "bytes", "seconds"))
        )
        for n, m in zip(a.messages, b.messages, strict=True)
    ]
    numbers = {f.name: carry(getattr(a, f.name), getattr(b, f.name)) for f in fields(StepTime) if f.type == "float"}
    time = StepTime(**numbers, messages=messages)
    late = max(0.0, time.hidden_s - config.plan.overlap * time.compute_s)
    return replace(time, step_s=time.compute_s + time.exposed_s + late)
