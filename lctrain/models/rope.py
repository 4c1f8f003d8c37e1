"""Rotary position embeddings: extend them in the config before the model is built, and prove that it happened."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lctrain.config.model import ROPE_FIELDS, RopeConfig, RopeType
from lctrain.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DEFAULTS = {RopeType.llama3: {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}


def apply_rope(config: PreTrainedConfig, rope: RopeConfig, *, max_length: int) -> None:
    """Write the extension into a Hugging Face config, in place, before a model is built from it.

    The base stays the model's unless rope.theta is given. The factor counts from
    original_max_position_embeddings: rope's, else the one the model was extended from, else its
    max_position_embeddings. max_position_embeddings becomes what the extension reaches.

    `dynamic` (NTK scaling) is fixed at max_length: transformers recomputes it from the longest position
    in each forward pass, which would differ between ranks of a split sequence and between
    micro-batches. It is written as the base it comes to, so the exported model uses the same
    frequencies at every length.
    Raises ConfigError for a model without rotary embeddings or with several kinds of them.
    """
    parameters = _parameters(config)
    if rope.type is not None:
        if parameters is None or "rope_theta" not in parameters:
            raise ConfigError(
                f"model.rope_scaling.type={rope.type.name} but {config.model_type} has no (single) rotary embedding; "
                "set model.rope_scaling.type=null"
            )
        parameters = _extended(config, parameters, rope, max_length=max_length)
    if parameters is not None and parameters.get("rope_type") == "dynamic":
        reach = math.floor(parameters["factor"] * config.max_position_embeddings)
        if config.max_position_embeddings < max_length <= reach:
            parameters = _fixed_dynamic(config, parameters, max_length=max_length)
    if parameters is not None:
        config.rope_parameters = parameters


def check_positions(config: PreTrainedConfig, *, max_length: int) -> None:
    """Raise ConfigError when a sequence is longer than the positions the model (extended) has."""
    parameters = _parameters(config)
    positions = getattr(config, "max_position_embeddings", None)
    if parameters is not None and parameters.get("rope_type") == "longrope":
        original = parameters["original_max_position_embeddings"]
        if max_length > original:
            raise ConfigError(
                f"data.max_length={max_length}: the model's rope_type=longrope picks its frequencies from the longest "
                f"position a rank sees, which differs between ranks past {original} tokens; set "
                f"data.max_length={original} or replace it, e.g. model.rope_scaling.type=yarn "
                f"model.rope_scaling.factor={_factor(max_length, original)}"
            )
    if positions is None or max_length <= positions:
        return
    if not parameters:
        raise ConfigError(
            f"data.max_length={max_length} is more than the {positions} positions {config.model_type} has learned "
            f"(max_position_embeddings); set data.max_length={positions}"
        )
    original = parameters.get("original_max_position_embeddings") or positions
    raise ConfigError(
        f"data.max_length={max_length} is more than the model's {positions} positions (max_position_embeddings); "
        f"extend them with model.rope_scaling.type=yarn model.rope_scaling.factor={_factor(max_length, original)}, "
        f"or set data.max_length={positions}"
    )


def expected_inv_freq(config: PreTrainedConfig) -> torch.Tensor:
    """The inverse frequencies [rotated dims / 2] that the config asks for, on the CPU in fp32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(config)
    assert parameters is not None, config.model_type
    if parameters["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))[0]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return parameters["rope_theta"] ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated).float()


def verify_inv_freq(model: nn.Module, config: PreTrainedConfig) -> None:
    """Compare the model's rotary buffers with what the config asks for.

    Raises ModelError when they differ, or when a config with rotary parameters built no such buffer.
    """
    if not _parameters(config):
        return
    found = [(name, b) for name, b in model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]
    if not found:
        raise ModelError(f"{config.model_type} has rope_parameters in its config but no inv_freq buffer to verify")
    expected = expected_inv_freq(config)
    for name, buffer in found:
        got = buffer.detach().cpu().float()
        if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-5, atol=0.0):
            raise ModelError(
                f"{name} is not what the config's rope_parameters {_parameters(config)} give; the model was built "
                "before RoPE was extended, or its code ignores rope_parameters"
            )


def _parameters(config: PreTrainedConfig) -> dict[str, Any] | None:
    parameters = getattr(config, "rope_parameters", None)
    return dict(parameters) if parameters else None


def _extended(config: PreTrainedConfig, before: dict[str, Any], rope: RopeConfig, *, max_length: int) -> dict[str, Any]:
    assert rope.type is not None
    if rope.type is RopeType.theta:
        config.max_position_embeddings = max(config.max_position_embeddings, max_length)
        return before | {"rope_theta": rope.theta}
    original = (
        rope.original_max_position_embeddings
        or before.get("original_max_position_embeddings")
        or config.max_position_embeddings
    )
    given = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.type] if getattr(rope, name) is not None}
    given.pop("theta", None)
    after = {
        "rope_type": rope.type.name,
        "rope_theta": before["rope_theta"] if rope.theta is None else rope.theta,
        **{name: before[name] for name in ("partial_rotary_factor",) if name in before},
        **_DEFAULTS.get(rope.type, {}),
        **given,
    }
    if "original_max_position_embeddings" in ROPE_FIELDS[rope.type]:
        after["original_max_position_embeddings"] = original
    if hasattr(config, "original_max_position_embeddings"):
        # transformers prefers this attribute (Phi-3 has it) to the entry of rope_parameters.
        config.original_max_position_embeddings = original
    if rope.type is RopeType.dynamic:
        config.max_position_embeddings = original
        after.pop("original_max_position_embeddings", None)
    else:
        config.max_position_embeddings = math.floor(original * after["factor"])
    return after


def _fixed_dynamic(config: PreTrainedConfig, parameters: dict[str, Any], *, max_length: int) -> dict[str, Any]:
    """NTK scaling's base at max_length: theta (f L / M - (f - 1))^(d / (d - 2)) for d rotated dimensions,
    M trained positions (transformers.modeling_rope_utils; bloc97's "NTK-aware scaled RoPE")."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    factor = parameters["factor"]
    stretch = factor * max_length / config.max_position_embeddings - (factor - 1)
    config.max_position_embeddings = max_length
    kept = {k: v for k, v in parameters.items() if k in ("partial_rotary_factor",)}
    theta = parameters["rope_theta"] * stretch ** (rotated / (rotated - 2))
    return {"rope_type": "default", "rope_theta": theta, **kept}


def _factor(max_length: int, original: int) -> int:
    return math.ceil(max_length / original)
