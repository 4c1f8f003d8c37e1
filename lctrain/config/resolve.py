"""Cross-field checks and the arithmetic of ranks and batches. No torch: milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config import image_checks, language_checks
from lctrain.config.checks import require, require_finite
from lctrain.config.model import CausalLMConfig
from lctrain.config.parallel import DdpConfig, SingleConfig
from lctrain.config.root import TrainConfig
from lctrain.config.schedule import DecayConfig
from lctrain.config.sizes import Sizes, layout_sizes
from lctrain.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    """A config that can run, with what follows from it."""

    config: TrainConfig
    sizes: Sizes
    accumulation: int


def resolve(config: TrainConfig, *, world_size: int | None = None, launcher: str = "the launcher") -> Resolved:
    """Check fields against each other and do the arithmetic.

    world_size: what an external launcher started; None when ranks are ours to start.
    Raises ConfigError.
    """
    check_required(config)
    require_finite(config)
    _check_end_lr(config)
    is_language = isinstance(config.model, CausalLMConfig)
    if is_language:
        language_checks.check_language(config)
    else:
        image_checks.check_images(config)
    ranks = wanted_ranks(config) if world_size is None else world_size
    _check_single(config, world_size, launcher)
    sizes = layout_sizes(config.parallel, ranks, heads=language_checks.heads(config))
    if not is_language:
        image_checks.check_batch(config, sizes)
    micro_steps = accumulation(config, sizes)
    if isinstance(config.parallel, DdpConfig) and config.parallel.static_graph and micro_steps > 1:
        raise ConfigError(
            f"parallel.static_graph=true does not work with {micro_steps} micro-steps a step, some of which exchange "
            "no gradients; set it to false, or raise train.micro_batch_size until there is one"
        )
    return Resolved(config, sizes, micro_steps)


def _check_end_lr(config: TrainConfig) -> None:
    peak = config.optim.peak_lr(config.train.global_batch_size)
    end = config.schedule.end_lr if isinstance(config.schedule, DecayConfig) else None
    require(
        end is None or end <= peak,
        "schedule.end_lr",
        end,
        f"is more than the peak rate {peak:g}, from which {config.schedule.kind} falls",
        "lower it, or raise optim.lr",
    )


def check_required(config: TrainConfig) -> None:
    """Everything a person must give, in one message."""
    is_language = isinstance(config.model, CausalLMConfig)
    missing = language_checks.missing_fields(config) if is_language else image_checks.missing_fields(config)
    if config.train.max_steps is None and config.train.max_epochs is None:
        missing.append("train.max_steps and train.max_epochs are both unset: set one, e.g. train.max_epochs=1")
    if missing:
        raise ConfigError("; ".join(missing) if len(missing) == 1 else "\n  - ".join(["several fields:", *missing]))


def wanted_ranks(config: TrainConfig) -> int:
    """World size of a job whose ranks are ours to start."""
    launch = config.launch
    if isinstance(config.parallel, SingleConfig):
        if (launch.nproc_per_node or 1) * launch.nodes != 1:
            raise ConfigError(
                f"launch.nproc_per_node={launch.nproc_per_node} with launch.nnodes={launch.nodes} needs several "
                "ranks but parallel=single runs one; choose parallel=ddp, fsdp, hsdp or fsdp_sp"
            )
        return 1
    if launch.nproc_per_node is not None:
        return launch.nproc_per_node * launch.nodes
    if launch.default_ranks % launch.nodes:
        raise ConfigError(
            f"launch.default_ranks={launch.default_ranks} does not divide over launch.nnodes={launch.nodes}; "
            "set launch.nproc_per_node"
        )
    return launch.default_ranks


def _check_single(config: TrainConfig, world_size: int | None, launcher: str) -> None:
    if isinstance(config.parallel, SingleConfig) and world_size not in (None, 1):
        raise ConfigError(
            f"parallel=single runs one rank but {launcher} started {world_size}; choose parallel=ddp, fsdp, hsdp "
            f"or fsdp_sp, or start one rank"
        )


def accumulation(config: TrainConfig, sizes: Sizes) -> int:
    """Micro-steps in a step. Raises ConfigError unless micro batch x data ranks divides the global batch."""
    at_once = config.train.micro_batch_size * sizes.data
    total = config.train.global_batch_size
    if total % at_once:
        preset = f" (preset={config.preset})" if config.preset else ""
        near = sorted({max(at_once, total // at_once * at_once), (total // at_once + 1) * at_once})
        raise ConfigError(
            f"train.global_batch_size={total}{preset} is not a multiple of train.micro_batch_size="
            f"{config.train.micro_batch_size} x {sizes.data} data ranks = {at_once}; "
            f"set train.global_batch_size to {' or '.join(map(str, near))}, or change "
            "train.micro_batch_size or the ranks"
        )
    return total // at_once
