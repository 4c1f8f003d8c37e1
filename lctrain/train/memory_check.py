"""Whether weights, gradients and optimizer state fit at all, by arithmetic, before anything is built.

Activations are left out: what is refused here cannot run whatever they take.
"""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.memory import Recompute
from lctrain.config.parallel import FsdpConfig, Zero3OffloadConfig, ZeroConfig
from lctrain.config.precision import Bf16Config
from lctrain.config.resolve import Resolved
from lctrain.errors import DeviceError

_FP32 = 4
_ADAM = 8  # two fp32 moments


@dataclass(frozen=True)
class ModelCounts:
    """Numbers of a whole model: parameters, those that train, decoder layers, width of the residual stream."""

    parameters: int
    trained: int
    layers: int
    width: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes a rank keeps from step to step, on its device and in host memory."""

    device: float
    host: float


def state_bytes(resolved: Resolved, counts: ModelCounts, compute_bytes: int) -> StateBytes:
    """State of one rank. compute_bytes: of one number in the compute dtype.

    torch's layouts keep fp32 weights, gradients and two moments (16 bytes a trained parameter); ZeRO keeps
    weights and gradients in the compute dtype beside an fp32 master and the moments.
    """
    parallel, sizes = resolved.config.parallel, resolved.sizes
    trained, frozen = counts.trained, counts.parameters - counts.trained
    device = host = 0.0
    if isinstance(parallel, ZeroConfig):
        weights = compute_bytes * counts.parameters / (sizes.world if parallel.stage == 3 else 1)
        gradients = compute_bytes * trained / (sizes.world if parallel.stage >= 2 else 1)
        if parallel.stage == 1 and isinstance(resolved.config.precision, Bf16Config):
            gradients += _FP32 * trained  # DeepSpeed's bf16 optimizer adds micro-steps up in fp32, unsharded
        optimizer = (_FP32 + _ADAM) * trained / sizes.world
        offload = parallel if isinstance(parallel, Zero3OffloadConfig) else None
        # The update runs where its state is, and DeepSpeed keeps the shards of gradients beside it.
        host += optimizer + gradients if offload and offload.offload_optimizer else 0.0
        host += weights if offload and offload.offload_param else 0.0
        device = weights + gradients + optimizer - host
    else:
        device = (trained * (2 * _FP32 + _ADAM) + frozen * _FP32) / sizes.shards
        if isinstance(parallel, FsdpConfig) and parallel.offload_params:
            device, host = 0.0, device
    if resolved.config.memory.recompute is Recompute.offload:
        train, length = resolved.config.train, resolved.config.documents.max_length
        tokens = train.micro_batch_size * length / (sizes.sp * sizes.cp * sizes.tp)
        host += counts.layers * tokens * counts.width * compute_bytes
    return StateBytes(device, host)


def check_memory(
    resolved: Resolved, counts: ModelCounts, *, compute_bytes: int, device_name: str, device_room: int,
    host_room: int, on_cpu: bool, ranks_here: int,
) -> None:  # fmt: skip
    """Raise DeviceError when a rank's device, or the host for all of its ranks, is too small for the state.

    device_room, host_room: bytes. On the CPU both are the same memory, shared by the ranks here.
    """
    need = state_bytes(resolved, counts, compute_bytes)
    size = f"{counts.parameters / 1e9:.2f}B parameters under parallel={resolved.config.parallel.kind}"
    mend = (
        "shard over more devices (parallel=fsdp or fsdp_sp, launch.nproc_per_node, launch.nnodes), train adapters "
        "(model.lora.rank=16) or choose a smaller model"
    )
    host_need = (need.host + (need.device if on_cpu else 0.0)) * ranks_here
    if not on_cpu and need.device > device_room:
        raise DeviceError(
            f"{size} need {_gib(need.device)} of weights, gradients and optimizer state a rank and {device_name} has "
            f"{_gib(device_room)}; {mend}"
        )
    if host_need > host_room:
        what = "weights, gradients and optimizer state" if on_cpu else "host memory for what is offloaded"
        less = "" if on_cpu else "offload less (memory=full, parallel=fsdp or zero3), "
        raise DeviceError(
            f"{size} need {_gib(host_need / ranks_here)} of {what} a rank, {ranks_here} ranks here, and this machine "
            f"has {_gib(host_room)} available; {less}{mend}"
        )


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"
