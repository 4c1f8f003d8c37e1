"""DeepSpeed ZeRO 1, 2 and 3 behind the engine interface.

DeepSpeed averages gradients over its data group, which here is every rank: sequence ranks hold different
tokens of the same sum. backward() therefore multiplies by the number of ranks, and accumulation is not
divided again. What is saved has the names and shapes any engine writes: tensors are gathered one at a time
and cut by rows, so checkpoints cross engines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from lctrain.config.parallel import ZeroConfig
from lctrain.engines.base import StepResult
from lctrain.engines.deepspeed_build import build_for_cpu
from lctrain.engines.sharded_state import MODEL, OPTIM, buffers, read_tensors, stored_keys, write_tensors
from lctrain.ops.shards import full_shape, local_part
from lctrain.runtime.mesh import Mesh

_STATES = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine:
    """One module under ZeRO."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        config: dict[str, Any],
        parallel: ZeroConfig,
        mesh: Mesh,
    ) -> None:
        deepspeed = import_deepspeed(mesh.device.type)
        self._stage = parallel.stage
        self._world = mesh.sizes.world
        self._device = mesh.device
        self.optimizer = optimizer
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self._zero = self._engine.optimizer

    @property
    def module(self) -> nn.Module:
        """The bare model; ZeRO-3's hooks, which gather parameters, are on its submodules."""
        return self._engine.module

    @property
    def model(self) -> nn.Module:
        """DeepSpeed's wrapper."""
        return self._engine

    @contextmanager
    def microstep(self, *, last: bool) -> Iterator[None]:
        """Tell DeepSpeed where the accumulation ends."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def autocast(self) -> AbstractContextManager[None]:
        """Parameters are in the compute dtype already."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Cancel DeepSpeed's average over ranks."""
        self._engine.backward(loss * self._world, scale_wrt_gas=False)

    def step(self, lr: float) -> StepResult:
        """DeepSpeed unscales, clips, updates and zeroes, and skips on every rank when the norm is not finite."""
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        skipped = bool(self._zero.overflow)
        norm = math.inf if skipped else float(self._engine.get_global_grad_norm())
        return StepResult(norm, skipped)

    def grad_norm(self) -> float:
        """From the gradients themselves, one parameter at a time."""
        total = sum(float(grad.cpu().double().square().sum()) for _, grad in self.gradients())
        return math.sqrt(total)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered one at a time."""
        from deepspeed.utils import safe_get_full_grad

        scale = self._loss_scale
        for name, parameter in self._trained():
            grad = safe_get_full_grad(parameter)
            if grad is not None:
                yield name, grad.view(full_shape(parameter)).float() / scale

    def scale_state(self) -> dict[str, float]:
        """DeepSpeed's loss scale, and the steps since it changed."""
        good = 0
        if getattr(self._zero, "dynamic_loss_scale", False):
            scaler = self._zero.loss_scaler
            good = (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window
        return {"value": self._loss_scale, "good_steps": good}

    def load_scale_state(self, state: dict[str, float]) -> None:
        """Continue with the saved loss scale (fp16)."""
        if getattr(self._zero, "dynamic_loss_scale", False):
            scaler = self._zero.loss_scaler
            scaler.cur_scale = float(state["value"])
            # It counts from the last overflow, which may lie before this process.
            scaler.last_overflow_iter = scaler.cur_iter - 1 - int(state["good_steps"])

    def save(self, folder: Path) -> None:
        """Gather one tensor after another, keep this rank's rows on the host, write them."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        state: dict[str, torch.Tensor] = buffers(self.module)
        step = self._optimizer_step()
        if step is not None:
            self._link_optimizer_state()
        for name, parameter in self._trained():
            state[MODEL + name] = self._rows(safe_get_full_fp32_param(parameter), parameter)
            if step is None:
                continue
            state[f"{OPTIM}{name}.step"] = step
            for key in _STATES:
                full = safe_get_full_optimizer_state(parameter, key)
                state[f"{OPTIM}{name}.{key}"] = self._rows(full, parameter)
        write_tensors(folder, state)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read this rank's rows, then gather one tensor after another into DeepSpeed's own partitions."""
        state = {MODEL + n: self._empty_rows(p) for n, p in self._trained()} | buffers(self.module)
        stored = stored_keys(folder)
        if optimizer:
            for name, parameter in self._trained():
                step = f"{OPTIM}{name}.step"
                if step in stored:
                    state[step] = torch.zeros((), dtype=torch.float32)
                    state |= {f"{OPTIM}{name}.{key}": self._empty_rows(parameter) for key in _STATES}
        read_tensors(folder, state)
        steps = [value for key, value in state.items() if key.endswith(".step")]
        if steps:
            self._make_optimizer_state(steps[0])
        for name, parameter in self._trained():
            self._set(parameter, None, state[MODEL + name])
            for key in _STATES if steps else ():
                self._set(parameter, key, state[f"{OPTIM}{name}.{key}"])

    @property
    def _loss_scale(self) -> float:
        """DeepSpeed's bf16 optimizer (ZeRO-1 with fp32 accumulation) has none."""
        return float(getattr(self._zero, "loss_scale", 1.0))

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self.module.named_parameters() if p.requires_grad)

    def _mesh(self) -> Any:
        return init_device_mesh("cpu", (self._world,))

    def _rows(self, full: torch.Tensor, parameter: nn.Parameter) -> DTensor:
        """This rank's rows of a whole tensor, on the host."""
        whole = full.detach().view(full_shape(parameter)).cpu()
        empty = self._empty_rows(parameter)
        local, (rows, *_) = local_part(empty)
        local.copy_(whole[rows])
        return empty

    def _empty_rows(self, parameter: nn.Parameter) -> DTensor:
        return zeros(full_shape(parameter), dtype=torch.float32, device_mesh=self._mesh(), placements=[Shard(0)])

    def _optimizer_step(self) -> torch.Tensor | None:
        """Adam's step count, None before the first step."""
        states = [s for s in self._zero.optimizer.state.values() if "step" in s]
        return torch.tensor(float(states[0]["step"])) if states else None

    def _make_optimizer_state(self, step: torch.Tensor) -> None:
        """State tensors for DeepSpeed's flat partitions, which torch would make in the first step."""
        # ZeRO-3, ZeRO-1 in bf16 with fp32 accumulation, and the rest name them differently.
        names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        for flat in next(getattr(self._zero, name) for name in names if hasattr(self._zero, name)):
            self._zero.optimizer.state[flat] = {"step": step.clone(), **{k: torch.zeros_like(flat) for k in _STATES}}
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Tell DeepSpeed below stage 3 which piece of its flat state belongs to which parameter.

        It does so itself once, after the update of the first parameter group, when the others have no state yet.
        """
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _set(self, parameter: nn.Parameter, key: str | None, rows: torch.Tensor) -> None:
        """Put a whole tensor where DeepSpeed keeps this rank's piece of it; key None is the parameter itself."""
        import deepspeed
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        assert isinstance(rows, DTensor)
        whole = rows.full_tensor().to(self._device.torch_device)
        if self._stage == 3:
            # The "full" setters read past the end of a tensor whose size the ranks do not divide.
            size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
            padded = nn.functional.pad(whole.flatten(), (0, size * self._world - whole.numel()))
            piece = padded[size * dist.get_rank() : size * (dist.get_rank() + 1)]
            if key is None:
                safe_set_local_fp32_param(parameter, piece)
            else:
                safe_set_local_optimizer_state(parameter, piece, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)
        if key is None:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._stage == 3):
                parameter.data.copy_(whole)


def import_deepspeed(device_type: str) -> Any:
    """DeepSpeed, told which device to use (it would guess) and to keep its running commentary to itself."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        # It asks whether oneDNN has fp16, as newer processors do, and refuses the others; torch computes on them all.
        accelerator.is_fp16_supported = lambda: True
        build_for_cpu()
    # Takes over the process group that exists; without it partitioning would see a world of one.
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def partition(module: nn.Module, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Give a meta module memory under ZeRO-3: one submodule at a time is whole, then split. Values are unset."""
    deepspeed = import_deepspeed(device.type)
    shared: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in shared:
                whole = torch.empty(parameter.shape, dtype=dtype, device=device)
                shared[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            owner._parameters[name] = shared[id(parameter)]
        deepspeed.zero.Init(module=_Own(owner), config_dict_or_path=config, dtype=dtype)
        owner._buffers.update({n: b if b is None else b.to(device) for n, b in owner._buffers.items()})


class _Own(nn.Module):
    """A module's direct parameters alone."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._parameters.update(owner._parameters)
