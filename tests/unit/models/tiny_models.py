"""Tiny models of several families, and batches of packed documents for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from lctrain.config.model import CausalLMConfig, ModelInit
from lctrain.models.causal_lm import CausalLM, build_meta
from lctrain.models.check import read_config
from lctrain.models.export import export_folder, hf_name
from lctrain.models.materialize import init_random, materialize_empty
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import attend_batch
from lctrain.ops.attention.sdpa import SdpaKernel
from lctrain.ops.text_batch import IGNORE

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
}


def config_of(family: str = "llama", max_length: int = 24, **changes: Any) -> Any:
    """A checked transformers config."""
    architecture = {"model_type": family, **TINY, **FAMILIES.get(family, {}), **changes}
    return read_config(CausalLMConfig(architecture=architecture, init=ModelInit.random), max_length=max_length)


def random_model(family: str = "llama", seed: int = 0, **changes: Any) -> CausalLM:
    """A model on the CPU with random weights and this rank's own attention."""
    model = build_meta(config_of(family, **changes))
    materialize_empty(model, torch.device("cpu"))
    init_random(model, seed=seed)
    model.route_attention(partial(attend_batch, SdpaKernel()))
    return model


def export(model: CausalLM, out: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Export a whole model as the verb does."""
    tensors = ((hf_name(name), tensor) for name, tensor in model.state_dict().items())
    export_folder(model.model.config, tensors, out=out, dtype=dtype, **options)


def packed_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Documents]:
    """(input_ids, position_ids, labels [2, 24], documents): two documents in row 0, one in row 1."""
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(10), torch.arange(14), torch.arange(24)]).view(2, 24)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = labels[0, 9] = IGNORE
    labels[1, :9] = IGNORE
    return ids, positions, labels, Documents((0, 10, 24, 48))
