"""LARS: each tensor's step is scaled by the ratio of its weight and gradient norms.

With w a weight, g its gradient, v its momentum, gamma the learning rate, beta the weight decay, m the momentum, eta
the trust coefficient:

    lambda = eta * |w| / (|g| + beta * |w| + eps), and 1 where either norm is 0

    paper                v <- m v + gamma lambda (g + beta w);  w <- w - v        You et al. 2017, arXiv:1708.03888
    momentum_corrected,
    lr_outside           v <- m v + lambda (g + beta w);        w <- w - gamma v  (the two differ in eps)
    nesterov             d = lambda (g + beta w); v <- m v + d; w <- w - gamma (d + m v)
    clipped              lr_outside with lambda <- min(lambda / gamma, 1); no decay where a norm is 0
    fujitsu              paper with |g| + beta * gamma0 * |w| + eps below, gamma0 the peak rate

Correcting the momentum of `paper` by gamma_t / gamma_(t-1) makes its v gamma times that of `lr_outside`, and the
weights equal: no past rate has to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from lctrain.config.optim import LarsForm
from lctrain.runtime.device import acts_as

EPS = {
    LarsForm.paper: 0.0,
    LarsForm.momentum_corrected: 0.0,
    LarsForm.lr_outside: 1e-8,
    LarsForm.nesterov: 1e-8,
    LarsForm.clipped: 1e-8,
    LarsForm.fujitsu: 1e-9,
}
_LR_INSIDE = (LarsForm.paper, LarsForm.fujitsu)


class Lars(torch.optim.Optimizer):
    """LARS over groups with a key `layerwise`: false makes a group plain SGD with momentum (lambda = 1).

    peak_lr: the largest rate of the schedule, which `fujitsu` divides by. eps: None takes the form's own. Parameters
    may be sharded DTensors: norms are those of whole tensors, by one all-reduce a step and group. Gradients are
    changed by a step.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        trust: float,
        form: LarsForm = LarsForm.paper,
        eps: float | None = None,
        peak_lr: float | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "layerwise": True})
        self.form = form
        self._momentum, self._trust = momentum, trust
        self._eps = EPS[form] if eps is None else eps
        self._peak_lr = lr if peak_lr is None else peak_lr

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. A collective over the ranks that shard parameters."""
        assert closure is None, "the trainer computes gradients itself"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        weights = [_local(p) for p in params]
        grads = [_local(p.grad) for p in params if p.grad is not None]
        buffers = [_local(self.state[p]["momentum"]) for p in params]
        update = self._one_by_one if acts_as(weights[0].device) == "cpu" else self._all_at_once
        update(group, _sharding_groups(params[0]), weights, grads, buffers)

    def _ratio(self, w: float, g: float, lr: float, beta: float) -> tuple[float, bool]:
        """lambda of a tensor with these norms, and whether it decays."""
        live = w > 0 and g > 0
        ratio = self._trust * w / (g + beta * self._scale * w + self._eps) if live else 1.0
        if self.form is not LarsForm.clipped:
            return ratio, True
        # At a rate of 0 nothing moves, whatever the ratio.
        return (min(ratio / lr, 1.0) if live and lr > 0 else 1.0), live

    def _ratios(self, w: torch.Tensor, g: torch.Tensor, lr: float, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`_ratio` of many tensors at once, [P] and [P] (1 or 0), without asking the device for a number."""
        live = (w > 0) & (g > 0)
        ratio = self._trust * w / (g + beta * self._scale * w + self._eps)
        if self.form is not LarsForm.clipped:
            return torch.where(live, ratio, 1.0), torch.ones_like(ratio)
        ratio = (ratio / lr).clamp(max=1.0) if lr > 0 else torch.ones_like(ratio)
        return torch.where(live, ratio, 1.0), live.to(ratio.dtype)

    @property
    def _scale(self) -> float:
        """Factor on the decay in lambda's denominator."""
        return self._peak_lr if self.form is LarsForm.fujitsu else 1.0

    def _one_by_one(
        self,
        group: dict[str, Any],
        axes: list[dist.ProcessGroup],
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        buffers: list[torch.Tensor],
    ) -> None:
        """CPU: each tensor is updated in one pass while its norms have it in the cache, with numbers of the host."""
        lr, beta = group["lr"], group["weight_decay"]
        inside, nesterov = self.form in _LR_INSIDE, self.form is LarsForm.nesterov
        sgd = partial(_sgd, lr=1.0 if inside else lr, momentum=self._momentum, nesterov=nesterov)
        if not group["layerwise"]:
            factor = lr if inside else 1.0
            sgd(weights, grads, buffers, factor=factor, decay=factor * beta)
            return
        # Sharded tensors share one all-reduce.
        known = [n.tolist() for n in _whole_norms(axes, weights, grads)] if axes else None
        for i, (w, g, v) in enumerate(map(_lines, weights, grads, buffers)):
            w_norm, g_norm = (known[0][i], known[1][i]) if known else (_norm(w), _norm(g))
            ratio, decays = self._ratio(w_norm, g_norm, lr, beta)
            factor = ratio * lr if inside else ratio
            sgd([w], [g], [v], factor=factor, decay=factor * beta if decays else 0.0)

    def _all_at_once(
        self,
        group: dict[str, Any],
        axes: list[dist.ProcessGroup],
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        buffers: list[torch.Tensor],
    ) -> None:
        """Accelerators: few launches over all tensors, and no number brought to the host."""
        lr, beta = group["lr"], group["weight_decay"]
        ratio = decay = torch.ones(len(weights), device=weights[0].device)
        if group["layerwise"]:
            ratio, decay = self._ratios(*_whole_norms(axes, weights, grads), lr, beta)
        inside = self.form in _LR_INSIDE
        factor = ratio * lr if inside else ratio
        torch._foreach_mul_(grads, list(factor.unbind()))
        if beta:
            decayed = torch._foreach_mul(weights, list((factor * beta * decay).unbind()))
            torch._foreach_add_(grads, decayed)
        torch._foreach_mul_(buffers, self._momentum)
        torch._foreach_add_(buffers, grads)
        if self.form is LarsForm.nesterov:
            torch._foreach_add_(grads, buffers, alpha=self._momentum)
            torch._foreach_add_(weights, grads, alpha=-lr)
            return
        torch._foreach_add_(weights, buffers, alpha=-1.0 if inside else -lr)


def _sgd(
    weights: list[torch.Tensor],
    grads: list[torch.Tensor],
    buffers: list[torch.Tensor],
    *,
    lr: float,
    factor: float,
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """v <- momentum v + factor g + decay w, then w <- w - lr v (Nesterov: lr (the new part + momentum v)), in place."""
    fused = getattr(torch, "_fused_sgd_", None)
    lines = list(map(_lines, weights, grads, buffers))
    if fused is not None and factor > 0 and all(_alike(*line) for line in lines):
        # What is left of a gradient after dampening: any factor in one pass. Nesterov's step takes the gradient
        # undampened, so there a gradient scale divides it before the decay is added.
        dampened = not nesterov
        fused(
            *map(list, zip(*lines, strict=True)),
            weight_decay=decay / factor if dampened else decay, momentum=momentum,
            lr=lr, dampening=1.0 - factor if dampened else 0.0, nesterov=nesterov, maximize=False, is_first_step=False,
            grad_scale=None if dampened else torch.tensor(1.0 / factor), found_inf=None,
        )  # fmt: skip
        return
    for w, g, v in zip(weights, grads, buffers, strict=True):
        g.mul_(factor).add_(w, alpha=decay)
        v.mul_(momentum).add_(g)
        w.sub_(g.add_(v, alpha=momentum) if nesterov else v, alpha=lr)


def _norm(tensor: torch.Tensor) -> float:
    """L2 norm, by NumPy's BLAS where it can: twice as quick as torch's own reduction.

    OpenBLAS adds from the front, wherever the tensor lies in memory; torch.dot adds in another order elsewhere. A
    gradient lies anywhere in DDP's buckets, and elsewhere after the first step: a continued run would not be the same.
    """
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.is_contiguous():
        return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))
    line = tensor.numpy().ravel()
    return math.sqrt(float(line.dot(line)))


def _lines(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors that lie in memory channels last, as lines: the fused kernel copies what is not contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return tensors
    steps = _steps(tensors[0])
    if tensors[0].is_contiguous(memory_format=torch.channels_last) and all(_steps(t) == steps for t in tensors):
        return tuple(t.as_strided((t.numel(),), (1,)) for t in tensors)
    return tensors


def _alike(*tensors: torch.Tensor) -> bool:
    """Whether the fused kernel, which walks memory from front to back, meets the same element in all of them."""
    return all(t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors)


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides that mean something: those of 1x1 convolutions differ between memory formats where sizes are 1."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_norms(
    axes: list[dist.ProcessGroup], weights: list[torch.Tensor], grads: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms [P] of whole weights and whole gradients, from this rank's parts of them; fp32, fp64 where they are.

    axes: the groups that hold the other parts.
    """
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm([*weights, *grads], 2, dtype))
    if axes:
        squares = norms.square()
        for group in axes:
            dist.all_reduce(squares, group=group)  # axes: those that shard parameters
        norms = squares.sqrt()
    w, g = norms.chunk(2)
    return w, g


def _sharding_groups(param: torch.Tensor) -> list[dist.ProcessGroup]:
    """Groups over which parameters are cut; all parameters of a model are cut over the same ones."""
    if not isinstance(param, DTensor):
        return []
    return [param.device_mesh.get_group(i) for i, p in enumerate(param.placements) if isinstance(p, Shard)]
