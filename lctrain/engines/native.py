"""single, DDP, FSDP2 and HSDP with torch's own parts.

FSDP2's averaging is turned off where the model is sharded (parallel/apply.py); DDP's is cancelled here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lctrain.config.parallel import DdpConfig, GradientDtype, ParallelConfig
from lctrain.engines.base import StepResult
from lctrain.engines.buffers import KeptBuffers
from lctrain.engines.sharded_state import read, write
from lctrain.optim.loss_scale import LossScale
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.overflow import OverflowFlag


class NativeEngine:
    """Runs forward, backward and update of one module under torch's layouts.

    autocast_dtype: compute in it where the layout does not see to precision itself; None leaves dtypes alone.
    companions: further tensors that belong in a checkpoint, by name. overflow: what else says that a step overflowed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        parallel: ParallelConfig,
        mesh: Mesh,
        autocast_dtype: torch.dtype | None,
        scale: LossScale,
        max_grad_norm: float | None,
        overflow: OverflowFlag | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.scale = scale
        self._max_grad_norm = max_grad_norm
        self._mesh, self._overflow, self._step_began = mesh, overflow, False
        self._device_type = mesh.device.type
        self._autocast_dtype = autocast_dtype
        self._buffers = KeptBuffers(module)
        self.companions: dict[str, torch.Tensor] = {}
        self.model: nn.Module = _ddp(module, parallel, mesh) if isinstance(parallel, DdpConfig) else module

    @contextmanager
    def microstep(self, *, last: bool) -> Iterator[None]:
        """Around a micro-batch's forward and backward; gradients cross ranks when `last`.

        FSDP2 reduce-scatters every micro-batch, so that no rank ever holds a whole gradient, and sums
        across replicas only at the last.
        """
        if not self._step_began:
            self._begin_step()
        hold: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.model, DistributedDataParallel) and not last:
            hold = self.model.no_sync()
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(last)
            self.module.set_is_last_backward(last)
        with hold, self.autocast():
            yield

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision where FSDP2's policy does not provide it."""
        if self._autocast_dtype in (None, torch.float32):
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast_dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a share of the global mean."""
        (loss * self.scale.value).backward()

    def grad_norm(self) -> float:
        """Global norm of the unscaled gradients. A collective over all ranks."""
        norm = torch.nn.utils.get_total_norm(self._grads())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm) / self.scale.value

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, its whole unscaled gradient) one after another. A collective over all ranks."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                yield name, grad / self.scale.value

    def step(self, lr: float) -> StepResult:
        """Unscale, clip, update and zero. A non-finite norm skips the whole step, buffers too, on every rank alike."""
        grad_norm = math.inf if self._overflowed() else self.grad_norm()
        finite = math.isfinite(grad_norm)
        self._step_began = False
        if finite:
            self._scale_grads(self._clip_factor(grad_norm) / self.scale.value)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        else:
            self._buffers.restore()
        self.optimizer.zero_grad(set_to_none=True)
        self.scale.update(finite=finite)
        return StepResult(grad_norm, not finite)

    def scale_state(self) -> dict[str, float]:
        """The loss scale, for the checkpoint."""
        return self.scale.state_dict()

    def load_scale_state(self, state: dict[str, float]) -> None:
        """The loss scale, from the checkpoint."""
        self.scale.load_state_dict(state)

    def save(self, folder: Path) -> None:
        """Write this rank's shards; nothing is gathered."""
        write(folder, self.module, self.optimizer, self.companions)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read this rank's shards in place."""
        read(folder, self.module, self.optimizer if optimizer else None, self.companions)

    def _begin_step(self) -> None:
        self._step_began = True
        if self._overflow is not None:
            self._overflow.clear()
        self._buffers.keep()

    def _overflowed(self) -> bool:
        """Whether any rank's flag is up: saturated gradients look finite (axes: all)."""
        return self._overflow is not None and self._mesh.max_over_all(float(self._overflow.raised())) > 0

    def _clip_factor(self, grad_norm: float) -> float:
        if self._max_grad_norm is None or grad_norm <= self._max_grad_norm:
            return 1.0
        return self._max_grad_norm / grad_norm

    def _grads(self) -> list[torch.Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _scale_grads(self, factor: float) -> None:
        if factor != 1.0:
            local = [g.to_local() if isinstance(g, DTensor) else g for g in self._grads()]
            torch._foreach_mul_(local, factor)


def _sum_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: sum where DDP would average (axis: all ranks)."""
    whole = bucket.buffer()
    work = dist.all_reduce(whole, async_op=True)
    return work.get_future().then(partial(_reduced, into=whole))


def _sum_bucket_in(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: sum in `dtype` and give back what the bucket holds (axis: all ranks)."""
    whole = bucket.buffer()
    rounded = whole.to(dtype)
    work = dist.all_reduce(rounded, async_op=True)
    # Into the bucket itself, whose views the gradients are.
    return work.get_future().then(partial(_reduced, into=whole, rounded=rounded))


def _reduced(
    future: torch.futures.Future[Any], *, into: torch.Tensor, rounded: torch.Tensor | None = None
) -> torch.Tensor:
    """`into`, which the reduction filled in place or is filled from `rounded`. Raises what the reduction raised."""
    future.value()
    return into if rounded is None else into.copy_(rounded)


# DDP compares annotations with types, and this file's are strings.
for _hook in (_sum_bucket, _sum_bucket_in):
    _hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def _ddp(module: nn.Module, parallel: DdpConfig, mesh: Mesh) -> DistributedDataParallel:
    device_ids = None if mesh.device.type == "cpu" else [mesh.device.index]
    # Ranks build equal weights themselves, so DDP need not broadcast them.
    with warnings.catch_warnings():
        # Its successor, forward_sync_buffers, does not exist in the oldest torch this package takes.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        model = DistributedDataParallel(
            module,
            device_ids=device_ids,
            bucket_cap_mb=parallel.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=parallel.static_graph,
            init_sync=False,
            broadcast_buffers=False,
        )
    match parallel.compress:
        case GradientDtype.fp32:
            model.register_comm_hook(None, _sum_bucket)
        case GradientDtype.bf16:
            model.register_comm_hook(torch.bfloat16, _sum_bucket_in)
        case GradientDtype.fp16:
            model.register_comm_hook(torch.float16, _sum_bucket_in)
    return model
