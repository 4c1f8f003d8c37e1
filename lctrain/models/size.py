"""How many parameters a model has and how many operations a batch costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lctrain.ops.attention.documents import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelSize:
    """Counted once on the whole (meta) model, before any layout cuts it.

    parameters: all, tied ones once. matmul_parameters: those a token is multiplied with in one forward
    pass (of a mixture, the experts it is sent to; the output embedding also when it is tied).
    attention_width: query heads x head dim, summed over layers.
    """

    parameters: int
    matmul_parameters: int
    attention_width: int

    def training_flops(self, documents: Documents) -> int:
        """Forward and backward of one batch, without recomputation.

        A matmul costs 2 operations a parameter and token forward and 4 backward; attention 4 * width a
        (query, key) pair forward (q k^T and p v) and 8 backward, over the causal pairs inside documents
        (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B, with the pairs counted exactly).
        """
        return 6 * self.matmul_parameters * documents.total + 12 * self.attention_width * documents.causal_pairs


def measure(hf: PreTrainedModel, layers: list[nn.Module]) -> ModelSize:
    """Size of a whole model, on any device including meta."""
    config = hf.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    looked_up = {id(m.weight) for m in hf.modules() if isinstance(m, nn.Embedding)}
    experts = next((n for n in (getattr(config, k, None) for k in _EXPERTS) if n), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    matmul = hf.get_output_embeddings().weight.numel()
    for parameter in hf.parameters():
        if parameter.ndim < 2 or id(parameter) in looked_up or parameter is hf.get_output_embeddings().weight:
            continue
        stacked = experts > 0 and parameter.ndim == 3 and parameter.shape[0] == experts
        matmul += parameter.numel() * chosen // experts if stacked else parameter.numel()
    return ModelSize(
        parameters=sum(p.numel() for p in hf.parameters()),
        matmul_parameters=matmul,
        attention_width=len(layers) * config.num_attention_heads * head_dim,
    )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
