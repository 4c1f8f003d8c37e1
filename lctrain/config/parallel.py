"""Layouts: how parameters, batch and sequence are spread over the ranks.

Builders match on the class. A layout has only the fields it honours, so that setting any other
one is an unknown key instead of an option that is silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.checks import MISSING, require


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
    """Data parallel: every rank holds all parameters, gradients and optimizer state."""

    kind: str = "ddp"
    bucket_mb: float = 25.0

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
    """FSDP2: parameters, gradients and optimizer state sharded over all ranks."""

    kind: str = "fsdp"
    reshard_after_forward: bool = True


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
