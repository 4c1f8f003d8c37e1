"""The only place that asks which engine."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lctrain.config.deepspeed import deepspeed_json
from lctrain.config.parallel import FsdpConfig, Zero3Config, ZeroConfig
from lctrain.config.resolve import Resolved
from lctrain.engines.base import Engine
from lctrain.engines.native import NativeEngine
from lctrain.errors import ConfigError
from lctrain.optim.build import build_optimizer, optimizer_groups
from lctrain.optim.loss_scale import LossScale
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.overflow import overflow_flag


def check_engine(resolved: Resolved) -> None:
    """Raise ConfigError when the layout's engine is not installed or its configuration contradicts the job."""
    if isinstance(resolved.config.parallel, ZeroConfig):
        if find_spec("deepspeed") is None:
            raise ConfigError(
                f"parallel={resolved.config.parallel.kind} needs DeepSpeed, which is not installed; "
                "pip install 'lctrain[deepspeed]', or choose parallel=fsdp or fsdp_sp"
            )
        _deepspeed_config(resolved)


def give_memory(
    module: nn.Module, resolved: Resolved, mesh: Mesh, dtype: torch.dtype, empty: Callable[[nn.Module, Any], None]
) -> None:
    """Storage for a meta module: by `empty`, or split from the start under ZeRO-3 (in the compute dtype)."""
    parallel = resolved.config.parallel
    if isinstance(parallel, FsdpConfig) and parallel.offload_params:
        empty(module, torch.device("cpu"))
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = None if buffer is None else buffer.to(mesh.device.torch_device)
        return
    if isinstance(parallel, Zero3Config):
        from lctrain.engines.deepspeed import partition

        partition(module, _deepspeed_config(resolved), mesh.device.torch_device, dtype)
        return
    empty(module, mesh.device.torch_device)


def build_engine(
    module: nn.Module,
    resolved: Resolved,
    mesh: Mesh,
    *,
    autocast_dtype: torch.dtype | None,
    report: Callable[[str], None],
) -> Engine:
    """The engine around a module that is laid out and has its first weights.

    autocast_dtype: what to compute in where the layout does not see to precision; None leaves dtypes alone.
    """
    config = resolved.config
    groups = optimizer_groups(config.optim, module)
    for group in groups:
        report(f"optimizer group {group.describe()}")
    optimizer = build_optimizer(config.optim, groups, peak_lr=config.optim.peak_lr(config.train.global_batch_size))
    if isinstance(config.parallel, ZeroConfig):
        from lctrain.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(
            module, optimizer, config=_deepspeed_config(resolved), parallel=config.parallel, mesh=mesh
        )
    scale = LossScale(config.precision)
    return NativeEngine(
        module,
        optimizer,
        parallel=config.parallel,
        mesh=mesh,
        autocast_dtype=autocast_dtype,
        scale=scale,
        max_grad_norm=config.train.max_grad_norm,
        overflow=overflow_flag(mesh.device) if scale.dynamic else None,
    )


def _deepspeed_config(resolved: Resolved) -> dict[str, Any]:
    return deepspeed_json(resolved.config, accumulation=resolved.accumulation, ranks=resolved.sizes.world)
