"""Layouts: how parameters, batch and sequence are spread over the ranks.

Builders match on the class. A layout has only the fields it honours, so that setting any other
one is an unknown key instead of an option that is silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lctrain.config.checks import MISSING, require


class GradientDtype(Enum):
    """What gradients cross ranks in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass(kw_only=True)
class ParallelConfig:
    """Base of every layout."""

    kind: str = MISSING


@dataclass(kw_only=True)
class SingleConfig(ParallelConfig):
    """One rank."""

    kind: str = "single"


@dataclass(kw_only=True)
class DdpConfig(ParallelConfig):
    """Data parallel: every rank holds all parameters, gradients and optimizer state.

    bucket_mb: gradients cross ranks in messages of so many MB while the backward pass goes on. static_graph: every
    step uses the same parameters in the same order, which lets DDP fix its messages after the first.
    compress: gradients cross ranks in this dtype; the update stays fp32.
    """

    kind: str = "ddp"
    bucket_mb: float = 25.0
    static_graph: bool = False
    compress: GradientDtype = GradientDtype.fp32

    def __post_init__(self) -> None:
        require(
            self.bucket_mb > 0,
            "parallel.bucket_mb",
            self.bucket_mb,
            "must be positive",
            "it is the gradient bucket size in MB, e.g. 25",
        )


@dataclass(kw_only=True)
class FsdpConfig(ParallelConfig):
    """FSDP2: parameters, gradients and optimizer state sharded over all ranks.

    reshard_after_forward: gather layers again for the backward instead of keeping them. offload_params: keep the
    shards of parameters, gradients and optimizer state in host memory, where the update then runs.
    """

    kind: str = "fsdp"
    reshard_after_forward: bool = True
    offload_params: bool = False


@dataclass(kw_only=True)
class HsdpConfig(FsdpConfig):
    """FSDP2 on a 2-D mesh: sharded inside groups of dp_shard_size, replicated across them (-1: the rest)."""

    kind: str = "hsdp"
    dp_replicate_size: int = 2
    dp_shard_size: int = -1


@dataclass(kw_only=True)
class FsdpSpConfig(FsdpConfig):
    """FSDP2 over all ranks, each sequence split over sp_size of them (Ulysses); -1: all ranks."""

    kind: str = "fsdp_sp"
    sp_size: int = -1


class CpMethod(Enum):
    """How keys and values reach the ranks that need them."""

    ring = "ring"
    allgather = "allgather"


@dataclass(kw_only=True)
class FsdpCpConfig(FsdpConfig):
    """FSDP2 over all ranks, each sequence split zigzag over cp_size of them (-1: all ranks).

    cp_method: ring passes keys and values from rank to rank; allgather collects them at once.
    """

    kind: str = "fsdp_cp"
    cp_size: int = -1
    cp_method: CpMethod = CpMethod.ring


@dataclass(kw_only=True)
class FsdpUspConfig(FsdpConfig):
    """FSDP2 over all ranks, each sequence split over sequence_ranks of them (-1: all ranks).

    Inside, sp_size ranks trade heads (Ulysses); outside, cp_size pass keys and values (ring). null takes
    the largest sp_size that divides the model's heads, and cp_size from what is left.
    """

    kind: str = "fsdp_usp"
    sequence_ranks: int = -1
    sp_size: int | None = None
    cp_size: int | None = None
    cp_method: CpMethod = CpMethod.ring


@dataclass(kw_only=True)
class FsdpTpConfig(FsdpConfig):
    """Tensor parallel over tp_size neighbouring ranks (-1: all), FSDP2 over the rest."""

    kind: str = "fsdp_tp"
    tp_size: int = -1


@dataclass(kw_only=True)
class DeepSpeedConfig:
    """What DeepSpeed is told beyond the stage.

    extra: keys of its own configuration, as a mapping. config: an existing DeepSpeed JSON, merged; what it
    says against the job is refused.
    """

    reduce_scatter: bool = True
    overlap_comm: bool = False
    reduce_bucket_size: int = 500_000_000
    extra: dict[str, Any] = field(default_factory=dict)
    config: str | None = None


@dataclass(kw_only=True)
class ZeroConfig(ParallelConfig):
    """DeepSpeed ZeRO over all ranks."""

    stage = 0
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)


@dataclass(kw_only=True)
class Zero1Config(ZeroConfig):
    """Optimizer state sharded."""

    kind: str = "zero1"
    stage = 1


@dataclass(kw_only=True)
class Zero2Config(ZeroConfig):
    """Optimizer state and gradients sharded."""

    kind: str = "zero2"
    stage = 2


@dataclass(kw_only=True)
class Zero3Config(ZeroConfig):
    """Optimizer state, gradients and parameters sharded."""

    kind: str = "zero3"
    stage = 3


@dataclass(kw_only=True)
class Zero3SpConfig(Zero3Config):
    """ZeRO-3 over all ranks, each sequence split over sp_size of them (Ulysses); -1: all ranks."""

    kind: str = "zero3_sp"
    sp_size: int = -1


@dataclass(kw_only=True)
class Zero3OffloadConfig(Zero3Config):
    """ZeRO-3 with optimizer state, and parameters if asked for, in host memory."""

    kind: str = "zero3_offload"
    offload_optimizer: bool = True
    offload_param: bool = True

    def __post_init__(self) -> None:
        require(
            self.offload_optimizer or self.offload_param,
            "parallel.offload_optimizer",
            False,
            "with parallel.offload_param=False offloads nothing",
            "turn one of them on, or choose parallel=zero3",
        )
