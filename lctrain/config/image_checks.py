"""What an image job needs across its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lctrain.config.batch_norm import BatchNormConfig, BnStatistics, BnSync
from lctrain.config.images import Crop, ImagesConfig
from lctrain.config.memory import MemoryConfig, Recompute
from lctrain.config.model import LeNetConfig, ResNetConfig
from lctrain.config.parallel import DdpConfig, FsdpConfig, HsdpConfig, SingleConfig
from lctrain.errors import ConfigError

if TYPE_CHECKING:
    from lctrain.config.root import TrainConfig
    from lctrain.config.sizes import Sizes

_LAYOUTS = (SingleConfig, DdpConfig, FsdpConfig, HsdpConfig)


def missing_fields(config: TrainConfig) -> list[str]:
    """What a person must still give. Raises ConfigError for data of the other regime."""
    if not isinstance(config.data, ImagesConfig):
        raise ConfigError(
            f"data={config.data.kind} does not fit model={config.model.kind}, which reads images; choose data=images "
            "or model=causal_lm"
        )
    if config.data.source is None:
        return ["data.source is not set: give a folder, files, a data set name or s3://bucket/prefix with images"]
    return []


def check_images(config: TrainConfig) -> None:
    """Fields against each other. Raises ConfigError."""
    parallel, memory = config.parallel, config.memory
    if type(parallel) not in _LAYOUTS:
        raise ConfigError(
            f"parallel={parallel.kind} splits sequences or DeepSpeed's states, which image models have not; choose "
            "parallel=single, ddp, fsdp or hsdp"
        )
    if memory.recompute is not Recompute.none or memory.tiled_mlp is not None:
        field = "recompute" if memory.recompute is not Recompute.none else "tiled_mlp"
        raise ConfigError(
            f"memory.{field} is for decoder layers and model={config.model.kind} has none; use memory=none"
        )
    if memory.loss_chunk_mb != MemoryConfig().loss_chunk_mb:
        raise ConfigError(
            f"memory.loss_chunk_mb={memory.loss_chunk_mb} has no effect on model={config.model.kind}; leave it out"
        )
    if isinstance(config.model, LeNetConfig):
        _check_lenet(config)
    if config.bn.statistics is BnStatistics.sync and config.bn.sync not in (BnSync.pooled, BnSync.precise):
        raise ConfigError(
            f"bn.sync={config.bn.sync.name} has no effect with bn.statistics=sync, where every rank has the statistics "
            "of all of them; leave it out, or give bn.sync=precise"
        )
    if isinstance(parallel, FsdpConfig) and parallel.offload_params:
        raise ConfigError("parallel.offload_params=true is not built for image models; set it to false")


def _check_lenet(config: TrainConfig) -> None:
    size = config.images.image_size
    if size < 12 or size % 4:
        raise ConfigError(
            f"data.image_size={size} does not fit model=lenet; give a multiple of 4 of at least 12, e.g. 28"
        )
    changed = [name for name, value in vars(config.bn).items() if value != getattr(BatchNormConfig(), name)]
    if changed:
        raise ConfigError(f"bn.{changed[0]} has no effect on model=lenet, which has no BatchNorm; leave bn.* out")


def check_batch(config: TrainConfig, sizes: Sizes) -> None:
    """What BatchNorm needs of a micro-batch. Raises ConfigError."""
    if not isinstance(config.model, ResNetConfig):
        return
    micro, ghost = config.train.micro_batch_size, config.bn.ghost_size
    if micro == 1:
        raise ConfigError(
            "train.micro_batch_size=1 gives BatchNorm one image at a time, which has no variance; set "
            f"train.micro_batch_size to at least 2, e.g. {max(2, config.train.global_batch_size // sizes.data)}"
        )
    if ghost is not None and micro % ghost:
        raise ConfigError(
            f"bn.ghost_size={ghost} does not divide train.micro_batch_size={micro}; choose a divisor of {micro}"
        )


def batch_notes(config: TrainConfig, accumulation: int, *, data_ranks: int) -> list[str]:
    """What a person should know of a batch that can be run."""
    notes = _idle(config)
    train, tuned = config.train, config.optim.tuned_for_batch
    # Whoever asks for ghost batches means them to be small.
    asked = config.bn.statistics is BnStatistics.ghost
    if isinstance(config.model, ResNetConfig) and accumulation > 1 and not asked:
        together = config.bn.statistics is BnStatistics.sync
        images = train.micro_batch_size * (data_ranks if together else 1)
        whose = "all ranks together have" if together else "a rank has"
        notes.append(
            f"warning: BatchNorm normalises {images:,} images at a time, not the {images * accumulation:,} {whose} in "
            f"a step, and updates its running statistics {accumulation} times a step; raise train.micro_batch_size if "
            "memory allows"
        )
    if tuned is not None and tuned != train.global_batch_size:
        notes.append(
            f"warning: optim.* and schedule.* were tuned for train.global_batch_size={tuned:,} and this run has "
            f"{train.global_batch_size:,}; its accuracy is not known"
        )
    return notes


def _idle(config: TrainConfig) -> list[str]:
    """Fields that another one makes idle. A recipe may have set them, so they are said and not refused."""
    images, bn = config.images, config.bn
    idle = {
        "data.crop_padding": images.crop is not Crop.padded and images.crop_padding != ImagesConfig().crop_padding,
        "data.crop_area": images.crop is not Crop.random_resized and images.crop_area != ImagesConfig().crop_area,
        "bn.precise_batches": bn.sync is not BnSync.precise and bn.precise_batches != BatchNormConfig().precise_batches,
    }
    why = {"data": f"data.crop={images.crop.name}", "bn": f"bn.sync={bn.sync.name}"}
    return [
        f"warning: {name} has no effect with {why[name.split('.')[0]]}" for name, is_idle in idle.items() if is_idle
    ]
