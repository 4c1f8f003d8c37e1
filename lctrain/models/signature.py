"""What makes two models the same model, for checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lctrain.config.model import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Where a config came from and how it runs, which change nothing of what the weights mean.
_IRRELEVANT = {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def signature(config: PreTrainedConfig, lora: LoraConfig) -> dict[str, Any]:
    """The architecture and its adapters as a JSON mapping."""
    same = {k: v for k, v in sorted(config.to_dict().items()) if k not in _IRRELEVANT}
    return same if lora.rank is None else same | {"lora": asdict(lora)}
