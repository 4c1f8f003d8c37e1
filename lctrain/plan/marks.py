"""What the tensors are that an engine keeps from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lctrain.config.parallel import ZeroConfig
from lctrain.config.precision import Fp32Config
from lctrain.config.root import TrainConfig
from lctrain.plan.trace import Trace

HOST = "host"
"""The mark of what has left the device."""

# DeepSpeed's attributes, stages 1 to 3 and its bf16 optimizer.
_DEEPSPEED = {
    "bit16_groups_flat": "parameters",
    "bf16_groups_flat": "parameters",
    "lp_param_buffer": "parameters",
    "fp16_partitioned_groups_flat": "parameters",
    "single_partition_of_fp32_groups": "master_weights",
    "fp32_partitioned_groups_flat": "master_weights",
    "fp32_groups_flat_partition": "master_weights",
    "grad_partitions_flat_buffer": "gradients",
    "averaged_gradients": "gradients",
    "fp32_groups_gradients_flat": "gradients",
    "fp32_groups_gradient_flat_partition": "gradients",
}


def mark_state(engine: Any, config: TrainConfig, trace: Trace) -> None:
    """Mark parameters, master weights and optimizer state, and the buffers an engine holds on to."""
    half = not isinstance(config.precision, Fp32Config)
    for parameter in engine.module.parameters():
        stays = getattr(parameter, "ds_tensor", parameter)
        trace.mark(stays, "master_weights" if half and stays.dtype == torch.float32 else "parameters")
    for buffer in engine.module.buffers():
        trace.mark(buffer, "parameters")
    if isinstance(config.parallel, ZeroConfig):
        for name, category in _DEEPSPEED.items():
            for tensor in _tensors(getattr(engine.model.optimizer, name, None)):
                trace.mark(tensor, category)
        for bucket in getattr(engine.model.optimizer, "ipg_buckets", {}).values():
            for tensor in _tensors(bucket.buffer):
                trace.mark(tensor, "communication")
    for tensor in _tensors(engine.optimizer.state):
        trace.mark(tensor, "optimizer_state")
    for companion in getattr(engine, "companions", {}).values():
        trace.mark(companion, "optimizer_state")


def mark_gradients(engine: Any, trace: Trace) -> None:
    """Mark what has been accumulated so far."""
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            trace.mark(parameter.grad, "gradients")
    for tensor in _tensors(getattr(getattr(engine.model, "optimizer", None), "averaged_gradients", None)):
        trace.mark(tensor, "gradients")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors anywhere in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
