"""A model of a config: its structure on meta, and its first weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lctrain.config.model import CausalLMConfig, ModelInit
from lctrain.errors import LctrainError, ModelError
from lctrain.models.causal_lm import CausalLM, build_meta, decoder_layers
from lctrain.models.lora import add_lora, init_lora
from lctrain.models.materialize import init_random
from lctrain.models.weights import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def build_model(
    config: CausalLMConfig,
    hf_config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    loss_chunk_mb: int = 256,
) -> CausalLM:
    """The model on meta, with adapters when asked for. Raises ModelError when its own code refuses the config."""
    try:
        model = build_meta(
            hf_config, dtype=dtype, loss_chunk_mb=loss_chunk_mb, trust_remote_code=config.trust_remote_code
        )
    except (AssertionError, ValueError, TypeError) as error:
        if isinstance(error, LctrainError):
            raise
        raise ModelError(
            f"{config.path or 'model.architecture'}: a {hf_config.model_type} cannot be built from it ({error}); "
            "correct its config"
        ) from error
    if config.lora.rank is not None:
        add_lora(model, decoder_layers(model), config.lora)
    return model


def set_first_weights(model: CausalLM, config: CausalLMConfig, *, seed: int) -> str | None:
    """Pretrained or random weights (and fresh adapters) for a materialized model, whatever its layout.

    Returns the hash of random weights, which must be equal on every rank, or None. Raises ModelError.
    """
    digest = None
    if config.init is ModelInit.pretrained:
        assert config.path is not None
        load_pretrained(model, config.path)
    else:
        digest = init_random(model, seed=seed)
    if config.lora.rank is not None:
        init_lora(model, seed=seed)
    return digest
