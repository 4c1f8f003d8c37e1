"""Ascend's fused operators in a Hugging Face model: one patch of that model alone, which can be undone.

What is replaced is found by what it computes from a few random numbers, not by its name alone: a norm that scales by
1 + weight (Gemma's) and an MLP with a multiplier stay as they are. Modules keep their parameters and names.

Legend: B batch, S sequence, H heads, D head dim, C width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import _disable_current_modes

from lctrain.errors import ModelError
from lctrain.models.causal_lm import CausalLM, decoder_layers
from lctrain.ops import npu_fused as ops

_ROTARY, _ARGUMENTS = "apply_rotary_pos_emb", ("q", "k", "cos", "sin", "unsqueeze_dim")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Fused:
    """What was replaced: norms, MLPs, and decoder layers' rotary embeddings. undo: put everything back."""

    norms: int
    mlps: int
    layers: int
    undo: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.norms} RMSNorm, {self.mlps} SwiGLU, rotary embedding of {self.layers} layers"


def fuse(model: CausalLM) -> Fused:
    """Let `model` (on meta or not, not yet laid out) compute with lctrain/ops/npu_fused.py where it can.

    `undo` also takes away what was put over the same forwards later. Raises ModelError when nothing in the model is
    what the fused operators compute.
    """
    hf, layers = model.model, decoder_layers(model)
    undo = ExitStack()
    with _on_real_numbers():
        norms = [m for m in hf.modules() if _is_rms_norm(m)]
        mlps = [m for m in hf.modules() if _is_swiglu(m)]
        rotating = [_rotary_modules(layer) for layer in layers] if _rotates_whole_heads(hf) else []
    for modules, forward in ((norms, _norm_forward), (mlps, _mlp_forward), (chain(*rotating), _attention_forward)):
        for module in modules:
            _replace(vars(module), "forward", MethodType(forward, module), undo)
    fused = Fused(len(norms), len(mlps), sum(map(bool, rotating)), undo.close)
    if not (fused.norms or fused.mlps or fused.layers):
        raise ModelError(
            f"model.npu_fused=true but {type(hf).__name__} has no RMSNorm, SwiGLU or rotary embedding of the kind "
            "Ascend's fused operators compute; set model.npu_fused=false"
        )
    return fused


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(hidden_states, self.weight, _eps(self))


def _mlp_forward(self: Any, states_BSC: torch.Tensor) -> torch.Tensor:
    return self.down_proj(ops.swiglu(self.gate_proj(states_BSC), self.up_proj(states_BSC)))


def _attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own, which finds the rotary function among its Python module's names, where others look too."""
    namespace = _namespace(self)
    plain, namespace[_ROTARY] = namespace[_ROTARY], _rotary
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        namespace[_ROTARY] = plain


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' signature: q [B, H, S, D], k, cos [B, S, D], sin (or q [B, S, H, D] with unsqueeze_dim=2)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)


def _replace(namespace: dict[str, Any], name: str, value: Any, undo: ExitStack) -> None:
    """Set a name among `namespace`'s, to be put back as it was, or removed."""
    if name in namespace:
        undo.callback(namespace.__setitem__, name, namespace[name])
    else:
        undo.callback(namespace.__delitem__, name)
    namespace[name] = value


# What computes what.


@contextmanager
def _on_real_numbers() -> Iterator[None]:
    """Without fake tensors, under which nothing can be compared, and without gradients."""
    with _disable_current_modes(), torch.no_grad():
        yield


def _is_rms_norm(module: nn.Module) -> bool:
    """x / sqrt(mean(x^2) + eps) * weight, from fp32 input."""
    if not type(module).__name__.endswith("RMSNorm") or not _takes_one(module) or set(module._parameters) != {"weight"}:
        return False
    eps, own = _eps(module), module._parameters["weight"]
    if not isinstance(eps, float) or own is None or own.dim() != 1:
        return False
    # The second row is as small as epsilon, which must count.
    weight, x = _numbers(own.numel()), _numbers(2, own.numel()) * torch.tensor([[1.0], [eps**0.5]])
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return _gives(_stand_in(module, _parameters={"weight": nn.Parameter(weight)}), x, wanted)


def _is_swiglu(module: nn.Module) -> bool:
    """down(silu(gate(x)) * up(x))."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in _PROJECTIONS) or not _takes_one(module):
        return False
    if module._parameters or not callable(getattr(module, "act_fn", None)):
        return False
    shapes = dict(zip(_PROJECTIONS, ((5, 4), (5, 4), (4, 5)), strict=True))
    # Not as Linear would be made by itself, from the program's own random numbers.
    small = {n: skip_init(nn.Linear, columns, rows, bias=False) for n, (rows, columns) in shapes.items()}
    for layer, numbers in zip(small.values(), _numbers(3, 20), strict=True):
        layer.weight.copy_(numbers.view_as(layer.weight))
    x = _numbers(3, 4)
    gate, up, down = small.values()
    return _gives(_stand_in(module, _modules={**module._modules, **small}), x, down(F.silu(gate(x)) * up(x)))


def _rotates_whole_heads(hf: Any) -> bool:
    """All of each head is rotated, by cosines and sines within the op's range, which YaRN's scaling leaves."""
    config = hf.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    embeddings = [m for m in hf.modules() if "inv_freq" in m._buffers]
    whole = all(
        2 * m._buffers["inv_freq"].shape[-1] == dim and getattr(m, "attention_scaling", 1.0) <= 1 for m in embeddings
    )
    return bool(embeddings) and whole and dim < ops.MAX_HEAD_DIM and config.num_attention_heads < ops.MAX_HEADS


def _rotary_modules(layer: nn.Module) -> list[nn.Module]:
    """A layer's attention, if the rotary function it calls is the plain one."""
    attention = (m for m in layer.modules() if "attention" in type(m).__name__.lower())
    return [m for m in attention if _is_rotary(_namespace(m).get(_ROTARY))]


def _namespace(module: nn.Module) -> dict[str, Any]:
    """The names of the Python module that defines a module's class."""
    return vars(sys.modules[type(module).__module__])


def _is_rotary(function: Any) -> bool:
    """x * cos + (-second half, first half) * sin for queries and keys."""
    if not callable(function) or tuple(inspect.signature(function).parameters) != _ARGUMENTS:
        return False
    numbers = _numbers(7, 3 * 8)
    q, k = numbers[:2].view(1, 2, 3, 8), numbers[2:3].view(1, 1, 3, 8)
    cos, sin = numbers[3:5].view(2, 1, 3, 8)
    wanted = tuple(x * cos + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin for x in (q, k))
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(function(q, k, cos, sin), wanted, strict=True)
    )


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")


def _stand_in(module: nn.Module, **parts: Any) -> nn.Module:
    """The same class and settings around other parameters or modules."""
    stand_in = object.__new__(type(module))
    vars(stand_in).update({**vars(module), **parts})
    return stand_in


def _gives(module: Any, x: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the class's own forward gives `wanted`; one that cannot run on so little is something else."""
    try:
        got = type(module).forward(module, x)
    except Exception:
        return False
    return isinstance(got, torch.Tensor) and got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4)
