"""A Hugging Face causal language model whose loss never builds whole logits and whose attention is ours.

Legend: B batch, S sequence (this rank's columns), C model width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lctrain.errors import ModelError
from lctrain.models.attention import ATTENTION, Attend, AttentionRouter, attach_router, register_attention
from lctrain.models.check import causal_lm_class, check_plain_head
from lctrain.models.head import head_logits, head_loss
from lctrain.models.rope import verify_inv_freq
from lctrain.models.size import measure
from lctrain.ops.attention.documents import Documents
from lctrain.ops.cross_entropy import chunk_tokens_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class CausalLM(nn.Module):
    """`model` is the ...ForCausalLM, `size` its ModelSize.

    loss_chunk_mb: MiB of fp32 logits held at once by the loss.
    """

    def __init__(self, model: PreTrainedModel, *, loss_chunk_mb: int = 256) -> None:
        super().__init__()
        self.model = model
        self.size = measure(model, _layers(model))
        self.chunk_tokens = chunk_tokens_for(model.get_output_embeddings().weight.shape[0], loss_chunk_mb)

    def route_attention(self, attend: Attend) -> AttentionRouter:
        """Send every layer's attention to `attend`; call it before the first forward pass."""
        router = AttentionRouter(attend)
        attach_router(self.model, decoder_layers(self), router)
        return router

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor,
        labels_BS: torch.Tensor | None,
        documents: Documents,
    ) -> torch.Tensor:
        """The sum of the labels' cross entropies, an fp32 scalar; without labels, logits [B, S, V].

        labels[b, t] is the token after position t, IGNORE where there is no loss. documents: boundaries
        of the whole unsplit batch.
        """
        states_BSC = self.model.get_decoder()(
            input_ids=input_ids_BS, position_ids=position_ids_BS, use_cache=False, documents=documents
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        if labels_BS is None:
            return head_logits(head, states_BSC)
        return head_loss(head, states_BSC, labels_BS, chunk_tokens=self.chunk_tokens)

    def logits(self, input_ids_BS: torch.Tensor, position_ids_BS: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Whole logits [B, S, V]: for tests and comparisons of short sequences."""
        return self(input_ids_BS, position_ids_BS, None, documents)


def build_meta(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    loss_chunk_mb: int = 256,
    trust_remote_code: bool = False,
) -> CausalLM:
    """The model with parameters on meta and real buffers; tied embeddings are tied.

    Raises ModelError for a model whose rotary buffers or output layer are not what they should be.
    """
    from accelerate import init_empty_weights

    kind = causal_lm_class(config, trust_remote_code=trust_remote_code)
    register_attention()
    with init_empty_weights(include_buffers=False):
        model = kind._from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    model.tie_weights()
    model.train()
    verify_inv_freq(model, config)
    check_plain_head(model)
    return CausalLM(model, loss_chunk_mb=loss_chunk_mb)


def decoder_layers(model: CausalLM) -> list[nn.Module]:
    """The decoder's layers in order. Raises ModelError when they cannot be found."""
    return _layers(model.model)


def _layers(hf: PreTrainedModel) -> list[nn.Module]:
    count = hf.config.num_hidden_layers
    lists = [m for m in hf.get_decoder().children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise ModelError(f"{type(hf).__name__}: its decoder has {len(lists)} lists of {count} layers, not one")
    return list(lists[0])


def parameter_count(model: CausalLM) -> int:
    """All parameters of the whole model, tied ones once."""
    return model.size.parameters


def causal_flops(model: CausalLM, documents: Documents) -> int:
    """Operations of forward and backward over one batch; see ModelSize.training_flops."""
    return model.size.training_flops(documents)
