"""Documents in the forms kernels want: batches of equal length, and bounds on a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from lctrain.ops.attention.documents import Documents


@dataclass(frozen=True)
class Run:
    """`count` consecutive documents of equal lengths: one batched kernel call on views."""

    count: int
    q_start: int
    q_length: int
    k_start: int
    k_length: int

    @property
    def q(self) -> slice:
        """Rows of the queries."""
        return slice(self.q_start, self.q_start + self.count * self.q_length)

    @property
    def k(self) -> slice:
        """Rows of the keys and values."""
        return slice(self.k_start, self.k_start + self.count * self.k_length)


@lru_cache(maxsize=64)
def runs(documents: Documents, kv_documents: Documents, *, causal: bool) -> tuple[Run, ...]:
    """Group consecutive documents whose query and key lengths repeat. Asserts the seam's rules."""
    assert len(documents) == len(kv_documents), (len(documents), len(kv_documents))
    groups: list[Run] = []
    for (q_start, q_end), (k_start, k_end) in zip(documents.spans(), kv_documents.spans(), strict=True):
        q_length, k_length = q_end - q_start, k_end - k_start
        assert not causal or q_length == k_length, (q_length, k_length)
        last = groups[-1] if groups else None
        if last is not None and (last.q_length, last.k_length) == (q_length, k_length):
            groups[-1] = Run(last.count + 1, last.q_start, q_length, last.k_start, k_length)
        else:
            groups.append(Run(1, q_start, q_length, k_start, k_length))
    return tuple(groups)


def joined(parts: list[torch.Tensor], *, dim: int) -> torch.Tensor:
    """Parts one after the other; a lone one is returned as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def device_bounds(documents: Documents, device: torch.device) -> torch.Tensor:
    """cu_seqlens as int32 on `device`, copied once per batch and device.

    Kept on the Documents object itself, so that it lives as long as its batch and no longer.
    """
    kept: dict[torch.device, torch.Tensor] = vars(documents).setdefault("_device_bounds", {})
    if device not in kept:
        kept[device] = torch.tensor(documents.cu_seqlens, dtype=torch.int32, device=device)
    return kept[device]
