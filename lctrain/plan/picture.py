"""A step's memory over its course, stacked by category, as one picture."""

from __future__ import annotations

from pathlib import Path

from lctrain.config.hardware import GIB
from lctrain.plan.memory import CATEGORIES, stacked
from lctrain.plan.plan import Plan
from lctrain.plan.simulate import Simulation

_MOST_POINTS = 4000


def draw_timeline(plan: Plan, simulation: Simulation, path: Path) -> None:
    """Categories over the events of the traced step, the phases named, the device's usable memory as a line."""
    from matplotlib.figure import Figure

    events = simulation.events
    start = next((i for i, e in enumerate(events) if e.phase != "start"), 0)
    stride = max(1, (len(events) - start) // _MOST_POINTS)
    series = {
        name: [v / GIB for v in values[start::stride]] for name, values in stacked(events, simulation.on_host).items()
    }
    shown = [name for name in CATEGORIES if max(series[name], default=0) > 0]
    figure = Figure(figsize=(11, 5), layout="constrained")
    axis = figure.subplots()
    steps = range(len(next(iter(series.values()))))
    axis.stackplot(
        steps, [series[name] for name in shown], labels=[name.replace("_", " ") for name in shown], step="post"
    )
    top = max(sum(values) for values in zip(*(series[name] for name in shown), strict=True))
    usable = (plan.hardware.usable_bytes - sum(plan.reserve.values())) / GIB
    if usable < 1.6 * top:
        axis.axhline(usable, color="black", linestyle="--", linewidth=1, label="usable, less the reserve")
    seen: set[str] = set()
    for index, event in enumerate(events[start::stride]):
        if event.phase not in seen:
            seen.add(event.phase)
            axis.axvline(index, color="grey", linewidth=0.6)
            axis.text(index, 1.01, f" {event.phase}", transform=axis.get_xaxis_transform(), fontsize=8)
    axis.set(xlabel="allocations and frees of one step", ylabel="GiB of tensors on one rank", xlim=(0, len(steps) - 1))
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(path, dpi=120)
