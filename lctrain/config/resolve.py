"""Cross-field checks and the arithmetic of ranks and batches. No torch: milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lctrain.config.data import HubConfig
from lctrain.config.model import ModelInit
from lctrain.config.parallel import FsdpTpConfig, SingleConfig
from lctrain.config.root import TrainConfig
from lctrain.config.sizes import Heads, Sizes, layout_sizes
from lctrain.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    """A config that can run, with what follows from it."""

    config: TrainConfig
    sizes: Sizes
    accumulation: int

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.sizes.world // self.config.launch.nnodes


def resolve(config: TrainConfig, *, world_size: int | None = None, launcher: str = "the launcher") -> Resolved:
    """Check fields against each other and do the arithmetic.

    world_size: what an external launcher started; None when ranks are ours to start.
    Raises ConfigError.
    """
    check_required(config)
    _check_memory_options(config)
    ranks = wanted_ranks(config) if world_size is None else world_size
    _check_launcher_ranks(config, world_size, launcher)
    sizes = layout_sizes(config.parallel, ranks, heads=_heads(config))
    return Resolved(config, sizes, accumulation(config, sizes))


def check_required(config: TrainConfig) -> None:
    """Everything a person must give, in one message."""
    missing = []
    if config.model.path is None and config.model.init is ModelInit.pretrained:
        missing.append(
            "model.path is not set: give the folder with config.json and safetensors, e.g. "
            "model.path=/models/llama-2-7b (or model.init=random to start from random weights)"
        )
    if config.model.path is None and not config.model.architecture:
        missing.append("model.architecture is empty and model.path is not set: give one of them")
    if config.data.path is None:
        what = "a data set name" if isinstance(config.data, HubConfig) else "a file or folder"
        missing.append(f"data.path is not set: give {what}, e.g. data={config.data.kind} data.path=...")
    if config.model.path is None and config.data.tokenizer is None and config.model.init is ModelInit.random:
        missing.append(
            "data.tokenizer is not set and there is no model.path to take it from: give a folder, or "
            "data.tokenizer=byte"
        )
    if config.train.max_steps is None and config.train.max_epochs is None:
        missing.append("train.max_steps and train.max_epochs are both unset: set one, e.g. train.max_epochs=1")
    if config.eval.every_steps and not (config.data.held_out or config.data.eval_path):
        missing.append(
            f"eval.every_steps={config.eval.every_steps} but there is nothing to evaluate on: set "
            "data.held_out=0.01 or data.eval_path, or eval.every_steps=0"
        )
    if missing:
        raise ConfigError("; ".join(missing) if len(missing) == 1 else "\n  - ".join(["several fields:", *missing]))


def _check_memory_options(config: TrainConfig) -> None:
    if isinstance(config.parallel, FsdpTpConfig):
        if config.memory.tiled_mlp is not None:
            raise ConfigError(
                f"memory.tiled_mlp={config.memory.tiled_mlp} does not work with parallel=fsdp_tp, which already splits "
                "every MLP; set memory.tiled_mlp=null or choose parallel=fsdp or fsdp_sp"
            )
        if config.model.lora.rank is not None:
            raise ConfigError(
                f"model.lora.rank={config.model.lora.rank} does not work with parallel=fsdp_tp; choose parallel=fsdp, "
                "fsdp_sp or fsdp_cp, or model.lora.rank=null"
            )


def wanted_ranks(config: TrainConfig) -> int:
    """World size of a job whose ranks are ours to start."""
    launch = config.launch
    if isinstance(config.parallel, SingleConfig):
        if (launch.nproc_per_node or 1) * launch.nnodes != 1:
            raise ConfigError(
                f"launch.nproc_per_node={launch.nproc_per_node} with launch.nnodes={launch.nnodes} needs several "
                "ranks but parallel=single runs one; choose parallel=ddp, fsdp, hsdp or fsdp_sp"
            )
        return 1
    if launch.nproc_per_node is not None:
        return launch.nproc_per_node * launch.nnodes
    if launch.default_ranks % launch.nnodes:
        raise ConfigError(
            f"launch.default_ranks={launch.default_ranks} does not divide over launch.nnodes={launch.nnodes}; "
            "set launch.nproc_per_node"
        )
    return launch.default_ranks


def _check_launcher_ranks(config: TrainConfig, world_size: int | None, launcher: str) -> None:
    if world_size is None:
        return
    wanted = config.launch.nproc_per_node
    if wanted is not None and wanted * config.launch.nnodes != world_size:
        raise ConfigError(
            f"launch.nproc_per_node={wanted} x launch.nnodes={config.launch.nnodes} does not match the "
            f"{world_size} ranks that {launcher} started; drop launch.nproc_per_node or change {launcher}'s number"
        )
    if isinstance(config.parallel, SingleConfig) and world_size != 1:
        raise ConfigError(
            f"parallel=single runs one rank but {launcher} started {world_size}; choose parallel=ddp, fsdp, hsdp "
            f"or fsdp_sp, or start one rank"
        )


def architecture(config: TrainConfig) -> dict[str, Any]:
    """The model's config.json (or model.architecture) as a mapping. Raises ConfigError when unreadable."""
    if config.model.path is None:
        return config.model.architecture
    path = Path(config.model.path).expanduser() / "config.json"
    if not path.parent.is_dir():
        raise ConfigError(f"model.path={config.model.path} is not a folder; give the model's local folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.path={config.model.path} has no config.json; give a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore the file") from error


def _heads(config: TrainConfig) -> Heads | None:
    """Head counts as far as config.json tells them; the model's own checks come later."""
    raw = architecture(config)
    heads = raw.get("num_attention_heads")
    if not isinstance(heads, int):
        return None
    return Heads(heads, raw.get("num_key_value_heads") or heads)


def accumulation(config: TrainConfig, sizes: Sizes) -> int:
    """Micro-steps in a step. Raises ConfigError unless micro batch x data ranks divides the global batch."""
    at_once = config.train.micro_batch_size * sizes.data
    total = config.train.global_batch_size
    if total % at_once:
        near = sorted({max(at_once, total // at_once * at_once), (total // at_once + 1) * at_once})
        raise ConfigError(
            f"train.global_batch_size={total} is not a multiple of train.micro_batch_size="
            f"{config.train.micro_batch_size} x {sizes.data} data ranks = {at_once}; "
            f"set train.global_batch_size to {' or '.join(map(str, near))}, or change train.micro_batch_size"
        )
    return total // at_once
