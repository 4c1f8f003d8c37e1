"""The output layer, whole or split over the vocabulary (tensor parallel).

Legend: B batch, S sequence, s = S / tp columns of this rank, C model width, V vocabulary, v rows of this rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lctrain.ops.cross_entropy import VocabularyPart, linear_cross_entropy
from lctrain.ops.shards import local_part


def head_loss(head: nn.Linear, states: torch.Tensor, labels_BS: torch.Tensor, *, chunk_tokens: int) -> torch.Tensor:
    """Sum of the labels' cross entropies. states: [B, S, C], or [B, s, C] in front of a split head."""
    weight: torch.Tensor = head.weight
    bias: torch.Tensor | None = head.bias
    part = None
    if isinstance(weight, DTensor):
        states = _gather_columns(states, weight)
        local, (rows, _) = local_part(weight)
        part = VocabularyPart(weight.device_mesh.get_group(), start=rows.start, size=local.shape[0])
        weight, bias = weight.to_local(), _local(bias)
    return linear_cross_entropy(
        states.flatten(0, 1), weight, labels_BS.flatten(), bias_V=bias, chunk_tokens=chunk_tokens, part=part
    )


def head_logits(head: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """Whole logits [B, S, V] on every rank."""
    weight: torch.Tensor = head.weight
    if not isinstance(weight, DTensor):
        return head(states)
    states_BSC = _gather_columns(states, weight)
    logits_BSv = nn.functional.linear(states_BSC, weight.to_local(), _local(head.bias))
    shape = torch.Size((*logits_BSv.shape[:2], weight.shape[0]))
    stride = (shape[1] * shape[2], shape[2], 1)
    logits = DTensor.from_local(logits_BSv, weight.device_mesh, [Shard(2)], shape=shape, stride=stride)
    return logits.full_tensor()


def _local(bias: torch.Tensor | None) -> torch.Tensor | None:
    return bias.to_local() if isinstance(bias, DTensor) else bias


def _gather_columns(states_BsC: torch.Tensor, weight: DTensor) -> torch.Tensor:
    """[B, s, C] to [B, S, C] (axis tp); its gradient is summed over ranks and cut again."""
    columns = DTensor.from_local(states_BsC, weight.device_mesh, [Shard(1)])
    return columns.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
