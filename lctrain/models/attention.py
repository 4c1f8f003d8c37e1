"""How a Hugging Face model's attention reaches our kernels: the registered function and its router.

Legend: B batch, S sequence (this rank's columns), H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lctrain.errors import ModelError
from lctrain.ops.attention.documents import Documents

ATTENTION = "lctrain"
"""The name our function has among transformers' attention implementations."""

Attend = Callable[..., torch.Tensor]
"""(q_BSHD, k_BSKD, v_BSKD, documents, *, scale) -> out_BSHD; one rank's kernel, or Ulysses around it."""

_REFUSED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias on attention scores",
    "head_mask": "a head mask",
    "alibi": "ALiBi",
}


class AttentionRouter:
    """What the attention modules of one model call. `calls` counts: one a layer and forward pass.

    Recomputed layers call again in the backward pass, so read `calls` between forward and backward.
    """

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.calls = 0


def register_attention() -> None:
    """Make `lctrain` an attention implementation of transformers. Idempotent.

    No mask function goes with it: transformers then builds no mask at all, and skips its search for
    packed sequences, which would read a device tensor back in every step.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def attach_router(model: nn.Module, layers: list[nn.Module], router: AttentionRouter) -> None:
    """Give `router` to every attention module of `layers`.

    Raises ModelError for a layer with no attention module.
    """
    for layer in layers:
        found = [m for m in layer.modules() if "attention" in type(m).__name__.lower()]
        if not found:
            raise ModelError(
                f"{type(model).__name__}: {type(layer).__name__} has no attention module; "
                "recurrent and linear-attention layers are not supported"
            )
        for module in found:
            vars(module)["lctrain_router"] = router


def _attention(
    module: nn.Module,
    q_BHSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: ([B, S, H, D], no weights)."""
    _check_call(module, q_BHSD, v_BKSD, attention_mask, dropout=dropout, documents=documents, kwargs=kwargs)
    assert documents is not None
    router = getattr(module, "lctrain_router", None)
    if router is None:
        raise ModelError(f"{type(module).__name__} calls attention but is not in a decoder layer that has a router")
    router.calls += 1
    scale = q_BHSD.shape[-1] ** -0.5 if scaling is None else scaling
    out_BSHD = router.attend(
        q_BHSD.transpose(1, 2), k_BKSD.transpose(1, 2), v_BKSD.transpose(1, 2), documents, scale=scale
    )
    return out_BSHD, None


def _check_call(
    module: nn.Module,
    q_BHSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float,
    documents: Documents | None,
    kwargs: dict[str, Any],
) -> None:
    """Raise ModelError for anything a causal kernel over documents would ignore."""
    name = type(module).__name__
    if documents is None:
        raise ModelError(
            f"{name} does not pass forward's keywords on to its attention, so document boundaries are lost"
        )
    if attention_mask is not None:
        raise ModelError(f"{name} was given an attention mask; document boundaries are given by `documents` alone")
    if dropout > 0:
        raise ModelError(f"{name}: attention dropout {dropout} is not supported; set it to 0 in config.json")
    for key, what in _REFUSED.items():
        if kwargs.get(key) is not None:
            raise ModelError(f"{name} uses {what} ({key}), which no kernel here computes")
    window = kwargs.get("sliding_window")
    if window is not None and window < documents.max_length:
        raise ModelError(
            f"{name} attends to a sliding window of {window} tokens, less than the longest document "
            f"({documents.max_length}); set data.max_length={window} or train another model"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(f"{name} is not causal")
    if q_BHSD.shape[-1] != v_BKSD.shape[-1]:
        raise ModelError(
            f"{name} has query heads of {q_BHSD.shape[-1]} and value heads of {v_BKSD.shape[-1]} "
            "dimensions (multi-head latent attention), which no kernel here computes"
        )
