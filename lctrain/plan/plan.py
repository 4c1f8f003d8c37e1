"""A plan: what a rank of a job takes and how long a step lasts, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lctrain.config.hardware import GIB, Hardware
from lctrain.config.parallel import ZeroConfig
from lctrain.config.resolve import Resolved
from lctrain.config.root import TrainConfig
from lctrain.plan.hand import Hand, by_hand
from lctrain.plan.memory import Peak, find_peak
from lctrain.plan.simulate import Simulation, simulate
from lctrain.plan.step_time import StepTime, step_time

ASSUMPTIONS = ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency", "overlap")


@dataclass(frozen=True)
class Plan:
    """reserve: bytes the device gives away before and between tensors, by what takes them.

    how: traced, or derived from traces of fewer layers. traced_on: whose fake tensors, cpu or npu.
    """

    config: TrainConfig
    hardware: Hardware
    resolved: Resolved
    peak: Peak
    reserve: dict[str, int]
    time: StepTime
    hand: Hand
    parameters: int
    unit: str
    units: float
    flops: float
    how: str
    traced_on: str

    @property
    def peak_bytes(self) -> int:
        """All of a rank's device memory at the fullest moment."""
        return self.peak.bytes + sum(self.reserve.values())

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.peak_bytes <= self.hardware.usable_bytes

    @property
    def units_per_s(self) -> float:
        """Tokens or images of all ranks."""
        return self.units / self.time.step_s

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that goes into the model's own operations (recomputation not counted)."""
        dtype = self.config.precision.kind
        peak = self.hardware.peak_tflops[dtype] * 1e12 * self.resolved.sizes.world
        return self.flops / self.time.step_s / peak

    @property
    def days(self) -> float | None:
        """Of plan.dataset_size, or of train.max_steps; None when neither is given."""
        size = self.config.plan.dataset_size
        if size is not None:
            epochs = self.config.train.max_epochs or 1.0
            return size * epochs / self.units_per_s / 86400
        steps = self.config.train.max_steps
        return None if steps is None else steps * self.time.step_s / 86400

    @property
    def cost(self) -> float | None:
        """Of those days on all devices, in the unit of plan.price_per_hour."""
        price = self.config.plan.price_per_hour
        return None if price is None or self.days is None else price * self.days * 24 * self.resolved.sizes.world

    def as_record(self) -> dict[str, Any]:
        """What plan.json holds."""
        return {
            "fits": self.fits,
            "layout": self.config.parallel.kind,
            "recompute": self.config.memory.recompute.name,
            "device": self.hardware.name,
            "world_size": self.resolved.sizes.world,
            "peak_bytes": self.peak_bytes,
            "tensor_bytes": self.peak.bytes,
            "usable_bytes": self.hardware.usable_bytes,
            "headroom_bytes": self.hardware.usable_bytes - self.peak_bytes,
            "host_bytes": self.peak.host_bytes,
            "peak_at": self.peak.place,
            "breakdown": self.peak.by_category | self.reserve,
            "by_hand": asdict(self.hand),
            "how": self.how,
            "traced_on": self.traced_on,
            "step_time_s": self.time.step_s,
            f"{self.unit}_per_s": self.units_per_s,
            "mfu": self.mfu,
            "days": self.days,
            "cost": self.cost,
            "step": {k: v for k, v in asdict(self.time).items() if k != "step_s"},
            "assumptions": {name: getattr(self.config.plan, name) for name in ASSUMPTIONS},
        }


def make_plan(config: TrainConfig, hardware: Hardware, ranks: int) -> tuple[Plan, Simulation]:
    """Trace the job and judge it. Raises ConfigError, ModelError."""
    simulation = simulate(config, hardware, ranks)
    peak = find_peak(simulation.events, on_host=simulation.on_host, rounding=hardware.rounding)
    time = step_time(
        simulation.operations,
        hardware,
        config.plan,
        accumulation=simulation.resolved.accumulation,
        traced=simulation.micro_steps,
    )
    return assemble(config, hardware, simulation, peak, time, parameters=simulation.parameters,
                    trained=simulation.trained, flops=simulation.flops, how="traced"), simulation  # fmt: skip


def assemble(
    config: TrainConfig,
    hardware: Hardware,
    simulation: Simulation,
    peak: Peak,
    time: StepTime,
    *,
    parameters: int,
    trained: int,
    flops: float,
    how: str,
) -> Plan:
    """A plan from its parts."""
    return Plan(
        config=config,
        hardware=hardware,
        resolved=simulation.resolved,
        peak=peak,
        reserve=_reserve(hardware, simulation.resolved, peak),
        time=time,
        hand=by_hand(config, simulation.resolved.sizes, parameters=parameters, trained=trained),
        parameters=parameters,
        unit=simulation.unit,
        units=simulation.units,
        flops=flops,
        how=how,
        traced_on=simulation.traced_on,
    )


def _reserve(hardware: Hardware, resolved: Resolved, peak: Peak) -> dict[str, int]:
    sizes = resolved.sizes
    groups = [sizes.dp_replicate, sizes.dp_shard * sizes.cp * sizes.sp, sizes.cp, sizes.sp, sizes.tp]
    # One communicator for all ranks, and one for each mesh axis that has several.
    communicators = int(sizes.world > 1) * (1 + sum(size > 1 for size in groups))
    if isinstance(resolved.config.parallel, ZeroConfig):
        communicators = int(sizes.world > 1) + (sizes.sp > 1)
    return {
        "device_context": int(hardware.context_gib * GIB),
        "communicators": int(communicators * hardware.communicator_mib * 2**20),
        "allocator_rounding": peak.rounding,
    }
