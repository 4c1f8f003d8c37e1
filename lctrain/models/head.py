"""The output layer, whole or split over the vocabulary (tensor parallel).

Legend: B batch, S sequence, s = S / tp columns of this rank, C model width, V vocabulary, v rows of this rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lctrain.ops.cross_entropy import VocabularyPart, linear_cross_entropy
from lctrain.ops.shards import local_part


def head_loss(head: nn.Module, states: torch.Tensor, labels_BS: torch.Tensor, *, chunk_tokens: int) -> torch.Tensor:
    """Sum of the labels' cross entropies. states: [B, S, C], or [B, s, C] in front of a split head."""
    weight, bias, part = head.weight, head.bias, None
    if isinstance(weight, DTensor):
        states = _gather_columns(states, weight)
        local, (rows, _) = local_part(weight)
        part = VocabularyPart(weight.device_mesh.get_group(), start=rows.start, size=local.shape[0])
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    return linear_cross_entropy(
        states.flatten(0, 1), weight, labels_BS.flatten(), bias_V=bias, chunk_tokens=chunk_tokens, part=part
    )


def head_logits(head: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Whole logits [B, S, V] on every rank."""
    weight = head.weight
    if not isinstance(weight, DTensor):
        return head(states)
    states_BSC = _gather_columns(states, weight)
    bias = None if head.bias is None else head.bias.to_local()
    logits_BSv = nn.functional.linear(states_BSC, weight.to_local(), bias)
    logits = DTensor.from_local(
        logits_BSv, weight.device_mesh, [Shard(2)], shape=(*logits_BSv.shape[:2], weight.shape[0]),
        stride=(logits_BSv.shape[1] * weight.shape[0], weight.shape[0], 1),
    )  # fmt: skip
    return logits.full_tensor()


def _gather_columns(states_BsC: torch.Tensor, weight: DTensor) -> torch.Tensor:
    """[B, s, C] to [B, S, C] (axis tp); its gradient is summed over ranks and cut again."""
    columns = DTensor.from_local(states_BsC, weight.device_mesh, [Shard(1)])
    return columns.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
