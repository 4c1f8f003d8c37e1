"""What to say when memory runs out: how much was asked for, and what would help this very job, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lctrain.config.memory import MemoryConfig, Recompute
from lctrain.config.model import CausalLMConfig
from lctrain.config.parallel import FsdpConfig, FsdpSpConfig, ParallelConfig, Zero3Config, ZeroConfig
from lctrain.config.resolve import Resolved, resolve
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError, DeviceError
from lctrain.runtime.failures import known_failure, out_of_memory

if TYPE_CHECKING:
    from lctrain.train.session import Session

Change = tuple[str, TrainConfig]

_SHORTEST = 512  # tokens; below, weights and optimizer state fill the memory and not the sequence


def explain(error: BaseException, session: Session) -> DeviceError | None:
    """The one message for memory that ran out or a failure that CANN names; None for any other error."""
    asked = out_of_memory(error)
    if asked is None:
        return known_failure(error)
    device = session.device
    memory = "host memory" if device.type == "cpu" else f"memory on {device.name}"
    return DeviceError(
        f"rank {session.ranks.rank} ran out of {memory}: {asked} could not be had, after at most "
        f"{device.peak_memory_bytes() / 2**30:.2f} GiB in use; what helps, in this order: "
        + "; ".join(options(session.resolved, host_is_free=device.type != "cpu"))
    )


def options(resolved: Resolved, *, host_is_free: bool) -> list[str]:
    """Overrides that need less memory and that this job's other settings allow, those that cost least first.

    host_is_free: offloading to host memory helps, as it does where the device has memory of its own.
    """
    config, world = resolved.config, resolved.sizes.world
    if isinstance(config.model, CausalLMConfig):
        changes = [*_language(resolved), *(_offloaded(config) if host_is_free else ()), *_shorter(config)]
    else:
        changes = list(_images(resolved))
    texts = [text for text, changed in changes if _allowed(changed, world)]
    if world == 1:
        sharded = "fsdp_sp" if isinstance(config.model, CausalLMConfig) else "fsdp"
        texts.append(f"more devices (launch.nproc_per_node=N parallel={sharded})")
    return [
        *texts,
        f"python -m lctrain plan recipe={config.recipe or 'NAME'} with these overrides says beforehand what fits",
    ]


def _language(resolved: Resolved) -> Iterator[Change]:
    config, memory = resolved.config, resolved.config.memory
    if memory.recompute in (Recompute.none, Recompute.selective):
        yield _memory(config, "memory=full", recompute=Recompute.full)
    yield from _smaller_micro_batch(config)
    yield from _layouts(resolved)
    if memory.tiled_mlp is None:
        yield _memory(config, "memory.tiled_mlp=4", tiled_mlp=4)


def _images(resolved: Resolved) -> Iterator[Change]:
    yield from _smaller_micro_batch(resolved.config)
    if resolved.sizes.world > 1 and not isinstance(resolved.config.parallel, FsdpConfig):
        yield _layout(resolved.config, FsdpConfig())


def _layouts(resolved: Resolved) -> Iterator[Change]:
    """Shard what is whole; then split each sequence, over twice as many ranks where it is split already."""
    config, sizes = resolved.config, resolved.sizes
    if sizes.world == 1:
        return
    sequence_ranks = sizes.sp * sizes.cp
    if isinstance(config.parallel, ZeroConfig) and config.parallel.stage < 3:
        yield _layout(config, Zero3Config())
    elif sizes.shards < sizes.world:
        yield _layout(config, FsdpConfig())
    if sequence_ranks == 1:
        yield _layout(config, FsdpSpConfig())
    elif isinstance(config.parallel, FsdpSpConfig) and sizes.sp < sizes.world:
        size = 2 * sizes.sp
        yield f"parallel.sp_size={size}", replace(config, parallel=replace(config.parallel, sp_size=size))


def _offloaded(config: TrainConfig) -> Iterator[Change]:
    parallel = config.parallel
    if config.memory.recompute is not Recompute.offload:
        yield _memory(config, "memory=offload", recompute=Recompute.offload)
    if isinstance(parallel, FsdpConfig) and not parallel.offload_params:
        yield "parallel.offload_params=true", replace(config, parallel=replace(parallel, offload_params=True))


def _shorter(config: TrainConfig) -> Iterator[Change]:
    length = config.documents.max_length // 2
    if length >= _SHORTEST:
        yield f"data.max_length={length}", replace(config, data=replace(config.documents, max_length=length))


def _smaller_micro_batch(config: TrainConfig) -> Iterator[Change]:
    size = config.train.micro_batch_size
    if size > 1:
        smaller = next(n for n in range(size // 2, 0, -1) if size % n == 0)
        changed = replace(config, train=replace(config.train, micro_batch_size=smaller))
        yield f"train.micro_batch_size={smaller}", changed


def _memory(config: TrainConfig, text: str, **fields: object) -> Change:
    changed: MemoryConfig = replace(config.memory, **fields)  # type: ignore[arg-type]
    return text, replace(config, memory=changed)


def _layout(config: TrainConfig, parallel: ParallelConfig) -> Change:
    return f"parallel={parallel.kind}", replace(config, parallel=parallel)


def _allowed(config: TrainConfig, world: int) -> bool:
    try:
        resolve(config, world_size=world)
    except ConfigError:
        return False
    return True
