"""How a layout spreads over ranks: the sizes of the mesh axes."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.parallel import (
    DdpConfig,
    FsdpConfig,
    FsdpCpConfig,
    FsdpSpConfig,
    FsdpTpConfig,
    FsdpUspConfig,
    HsdpConfig,
    ParallelConfig,
    SingleConfig,
    Zero3SpConfig,
    ZeroConfig,
)
from lctrain.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model."""

    query: int
    key_value: int


@dataclass(frozen=True)
class Sizes:
    """How many ranks each mesh axis has; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    sp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.sp * self.tp

    @property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Pieces parameters and optimizer state are cut into."""
        return self.dp_shard * self.cp * self.sp * self.tp

    @property
    def length_multiple(self) -> int:
        """Rows of a batch are padded to a multiple of this: two zigzag chunks a cp rank, cut for sp or tp ranks."""
        return self.sp * self.tp * (2 * self.cp if self.cp > 1 else 1)


def layout_sizes(parallel: ParallelConfig, ranks: int, *, heads: Heads | None = None) -> Sizes:
    """Mesh sizes of a layout over `ranks`.

    heads: the model's, None when unknown. Raises ConfigError when sizes do not multiply out, or when heads do
    not divide.
    """
    match parallel:
        case SingleConfig():
            return Sizes(1, 1)
        case DdpConfig():
            return Sizes(ranks, 1)
        case HsdpConfig():
            replicate, shard = parallel.dp_replicate_size, parallel.dp_shard_size
            replicate, shard = _fill("dp_replicate_size", replicate, "dp_shard_size", shard, ranks)
            return Sizes(replicate, shard)
        case FsdpSpConfig():
            sp = _part("sp_size", parallel.sp_size, ranks)
            _check_sp(sp, ranks, heads)
            return Sizes(1, ranks // sp, sp=sp)
        case FsdpCpConfig():
            cp = _part("cp_size", parallel.cp_size, ranks)
            return Sizes(1, ranks // cp, cp=cp)
        case FsdpUspConfig():
            return _usp_sizes(parallel, ranks, heads)
        case FsdpTpConfig():
            tp = _part("tp_size", parallel.tp_size, ranks)
            _check_tp(tp, ranks, heads)
            return Sizes(1, ranks // tp, tp=tp)
        case Zero3SpConfig():
            sp = _part("sp_size", parallel.sp_size, ranks)
            _check_sp(sp, ranks, heads)
            return Sizes(1, ranks // sp, sp=sp)
        case ZeroConfig():
            return Sizes(1, ranks)
        case FsdpConfig():
            return Sizes(1, ranks)
    raise AssertionError(type(parallel))


def _part(name: str, size: int, ranks: int) -> int:
    """A size that must divide the ranks; -1 is all of them."""
    size = ranks if size == -1 else size
    if size < 1 or ranks % size:
        raise ConfigError(f"parallel.{name}={size} does not divide the {ranks} ranks; choose one of {_divisors(ranks)}")
    return size


def _fill(a_name: str, a: int, b_name: str, b: int, ranks: int) -> tuple[int, int]:
    if a == -1 and b == -1:
        raise ConfigError(f"parallel.{a_name}=-1 and parallel.{b_name}=-1 cannot both be the rest; set one of them")
    if a == -1 and b > 0 and ranks % b == 0:
        a = ranks // b
    if b == -1 and a > 0 and ranks % a == 0:
        b = ranks // a
    if a < 1 or b < 1 or a * b != ranks:
        raise ConfigError(
            f"parallel.{a_name}={a} x parallel.{b_name}={b} is not the {ranks} ranks; choose sizes from "
            f"{_divisors(ranks)} whose product is {ranks}, or -1 for the rest"
        )
    return a, b


def _usp_sizes(parallel: FsdpUspConfig, ranks: int, heads: Heads | None) -> Sizes:
    sequence = _part("sequence_ranks", parallel.sequence_ranks, ranks)
    sp, cp = parallel.sp_size, parallel.cp_size
    if sp is None and cp is None:
        fitting = [d for d in range(1, sequence + 1) if sequence % d == 0 and (heads is None or heads.query % d == 0)]
        sp = max(fitting)
    sp, cp = _fill("sp_size", -1 if sp is None else sp, "cp_size", -1 if cp is None else cp, sequence)
    _check_sp(sp, ranks, heads)
    return Sizes(1, ranks // sequence, sp=sp, cp=cp)


def _check_sp(sp: int, ranks: int, heads: Heads | None) -> None:
    if heads is None or heads.query % sp == 0:
        return
    fit = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0 and heads.query % d == 0)
    raise ConfigError(
        f"parallel.sp_size={sp} does not divide the model's {heads.query} attention heads; with {ranks} ranks choose "
        f"parallel.sp_size from {fit}, or parallel=fsdp_usp, which puts a ring around what heads allow"
    )


def _check_tp(tp: int, ranks: int, heads: Heads | None) -> None:
    if heads is None or (heads.query % tp == 0 and heads.key_value % tp == 0):
        return
    fit = [d for d in range(1, ranks + 1) if ranks % d == 0 and heads.query % d == 0 and heads.key_value % d == 0]
    raise ConfigError(
        f"parallel.tp_size={tp} does not divide the model's {heads.query} query and {heads.key_value} key/value heads; "
        f"with {ranks} ranks choose parallel.tp_size from {', '.join(map(str, fit))}, or parallel=fsdp_sp"
    )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
