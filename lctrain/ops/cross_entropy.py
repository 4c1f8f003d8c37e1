"""Cross entropy of a linear output layer without ever holding the logits of all tokens.

Legend: T tokens, t tokens of one chunk, V vocabulary, C model width.

The loss is a sum, so its gradients with respect to hidden states and weight are known up to a scalar
as soon as a chunk's logits are: they are taken in the forward pass and scaled in the backward, and the
logits are computed once. d loss / d logits = softmax(logits) - onehot(label).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lctrain.ops.text_batch import IGNORE
from lctrain.runtime.device import acts_as


def chunk_tokens_for(vocabulary: int, budget_mb: int) -> int:
    """Tokens whose fp32 logits fill `budget_mb` MiB, at least 1; whole tiles of 128 where they fit."""
    tokens = max(1, budget_mb * 2**20 // (4 * vocabulary))
    return tokens // 128 * 128 or tokens


def linear_cross_entropy(
    hidden_TC: torch.Tensor,
    weight_VC: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    chunk_tokens: int,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden weight^T + bias)[label]: an fp32 scalar.

    Labels equal to IGNORE add nothing; if all are, the result is a zero with a graph. Logits are
    computed in autocast's dtype where it is on, else in hidden's; the softmax, the sum and the
    weight's gradient are fp32. Holds one [chunk_tokens, V] fp32 buffer (and one in the compute dtype
    when that is not fp32; smaller ones on a CPU), and from forward to backward the gradients of hidden
    and weight.

    part: weight and bias are these rows of a vocabulary split over ranks. Every rank gets the whole loss
    and its rows' gradients; hidden's gradient is this rank's share, to be summed over the ranks.
    """
    device_type = hidden_TC.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_TC.dtype
    differentiable = torch.is_grad_enabled()
    if acts_as(hidden_TC.device) == "cpu" and part is None:  # ranks with parts of a vocabulary must cut equal chunks
        chunk_tokens = min(chunk_tokens, _cached_tokens(*weight_VC.shape))
    with torch.autocast(device_type, enabled=False):
        return _LinearCrossEntropy.apply(
            hidden_TC,
            weight_VC,
            bias_V,
            labels_T,
            dtype,
            max(1, min(chunk_tokens, len(labels_T))),
            differentiable,
            part or _Whole(),
        )


def _cached_tokens(vocabulary: int, width: int) -> int:
    """Tokens of a chunk that a CPU works on fastest: 16 MiB of fp32 logits, which stay in its cache.

    At least width / 4, because a chunk also reads and writes the weight's whole gradient.
    """
    return max(2**24 // (4 * vocabulary), width // 4, 64)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        dtype: torch.dtype,
        chunk_tokens: int,
        differentiable: bool,
        vocabulary: _Whole | VocabularyPart,
    ) -> torch.Tensor:
        hidden, weight = hidden_TC.to(dtype), weight_VC.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        buffers = _Buffers(chunk_tokens, weight)
        grads = _Grads(hidden, weight, bias, ctx.needs_input_grad) if differentiable else None
        counted_T = labels_T != IGNORE
        labels_T1 = labels_T.masked_fill(~counted_T, 0)[:, None]
        losses_T = hidden.new_empty(len(labels_T), dtype=torch.float32)
        for start in range(0, len(labels_T), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            exp_tV = buffers.logits(hidden[rows], weight, bias)
            top_t1 = vocabulary.max(exp_tV.amax(-1, keepdim=True))
            column_t1, here_t1 = vocabulary.columns(labels_T1[rows])
            label_t1 = exp_tV.gather(1, column_t1) - top_t1
            own_t1 = exp_tV.sub_(top_t1).exp_().sum(-1, keepdim=True)
            label_t1, total_t1 = vocabulary.sums(label_t1, own_t1, here_t1)
            losses_T[rows] = (total_t1.log() - label_t1).squeeze(1)
            if grads is not None:
                exp_tV.scatter_add_(1, column_t1, -total_t1 if here_t1 is None else -total_t1 * here_t1)
                grads.add(rows, *buffers.dlogits(exp_tV, total_t1, counted_T[rows, None]))
        ctx.grads = grads
        ctx.dtypes = hidden_TC.dtype, weight_VC.dtype, None if bias_V is None else bias_V.dtype
        return losses_T.mul_(counted_T).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.grads
        assert grads is not None, "the loss's gradients were used: backward runs once a forward"
        ctx.grads = None
        scaled = (
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(grads.results(), ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None


class _Whole:
    """A vocabulary that this rank has all of."""

    def max(self, top_t1: torch.Tensor) -> torch.Tensor:
        """Over the vocabulary."""
        return top_t1

    def columns(self, labels_t1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where labels lie, and which lie here (None: all)."""
        return labels_t1, None

    def sums(
        self, label_t1: torch.Tensor, total_t1: torch.Tensor, here_t1: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The labels' logits and the softmax sums over the vocabulary."""
        return label_t1, total_t1


class VocabularyPart:
    """Rows [start, start + size) of a vocabulary split over `group` (axis tp)."""

    def __init__(self, group: dist.ProcessGroup, *, start: int, size: int) -> None:
        self._group, self._start, self._size = group, start, size

    def max(self, top_t1: torch.Tensor) -> torch.Tensor:
        """Over the vocabulary."""
        dist.all_reduce(top_t1, op=dist.ReduceOp.MAX, group=self._group)
        return top_t1

    def columns(self, labels_t1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where labels lie (0 for those of other ranks), and which lie here."""
        column_t1 = labels_t1 - self._start
        here_t1 = (column_t1 >= 0) & (column_t1 < self._size)
        return column_t1.masked_fill(~here_t1, 0), here_t1

    def sums(
        self, label_t1: torch.Tensor, total_t1: torch.Tensor, here_t1: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The labels' logits and the softmax sums over the vocabulary, by one all-reduce."""
        assert here_t1 is not None
        both_2t1 = torch.stack((label_t1.masked_fill(~here_t1, 0.0), total_t1))
        dist.all_reduce(both_2t1, group=self._group)
        return both_2t1[0], both_2t1[1]


class _Buffers:
    """One chunk's logits in the compute dtype and in fp32; the same memory when that dtype is fp32."""

    def __init__(self, chunk_tokens: int, weight: torch.Tensor) -> None:
        shape = chunk_tokens, weight.shape[0]
        self.compute_tV = weight.new_empty(shape)
        self.fp32_tV = self.compute_tV
        if weight.dtype != torch.float32:
            self.fp32_tV = weight.new_empty(shape, dtype=torch.float32)

    def logits(self, hidden_tC: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """fp32 [t, V], valid until the next call."""
        out = self.compute_tV[: len(hidden_tC)]
        if bias is None:
            torch.mm(hidden_tC, weight.t(), out=out)
        else:
            torch.addmm(bias, hidden_tC, weight.t(), out=out)
        return out if self.fp32_tV is self.compute_tV else self.fp32_tV[: len(hidden_tC)].copy_(out)

    def dlogits(
        self, x_tV: torch.Tensor, total_t1: torch.Tensor, counted_t1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, factor_t1) whose product is counted * x / total, in the compute dtype, in place of the logits.

        In fp32 the division is left to the factor, which saves a pass over [t, V]; a half-precision y
        has to be divided before it is rounded, because x goes up to V.
        """
        if self.fp32_tV is self.compute_tV:
            return x_tV, counted_t1 / total_t1
        out = self.compute_tV[: len(x_tV)]
        return out.copy_(x_tV.div_(total_t1)), counted_t1.to(out.dtype)


class _Grads:
    """Gradients of the unscaled loss: the weight's and the bias's accumulate over chunks in fp32."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
    ) -> None:
        self.hidden, self.weight = hidden, weight
        self.hidden_TC = torch.empty_like(hidden) if wanted[0] else None
        self.weight_VC: torch.Tensor | None = None
        self.bias_V: torch.Tensor | None = None
        self._want_weight, self._want_bias = wanted[1], bias is not None and wanted[2]
        # A chunk's fp16 sum over tokens can pass 65504 before any loss scale could prevent it.
        self._shrink = 1 / 64 if hidden.dtype == torch.float16 else 1.0

    def add(self, rows: slice, dlogits_tV: torch.Tensor, factor_t1: torch.Tensor) -> None:
        """Add one chunk. `factor` masks ignored tokens in the small operands, never in [t, V]."""
        if self.hidden_TC is not None:
            torch.mm(dlogits_tV, self.weight, out=self.hidden_TC[rows]).mul_(factor_t1)
        if self._want_weight:
            self.weight_VC = self._sum(self.weight_VC, dlogits_tV, self.hidden[rows] * factor_t1)
        if self._want_bias:
            self.bias_V = self._sum(self.bias_V, dlogits_tV, factor_t1)

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """Of hidden, weight and bias."""
        return self.hidden_TC, self.weight_VC, None if self.bias_V is None else self.bias_V.squeeze(1)

    def _sum(self, so_far: torch.Tensor | None, dlogits_tV: torch.Tensor, x_tC: torch.Tensor) -> torch.Tensor:
        """so_far + dlogits^T x. The first chunk stays as the matmul gives it: often there is no second."""
        if so_far is not None and x_tC.dtype == torch.float32:
            return so_far.addmm_(dlogits_tV.t(), x_tC)
        if self._shrink == 1.0:
            part = dlogits_tV.t() @ x_tC
        else:
            part = (dlogits_tV.t() @ (x_tC * self._shrink)).float().div_(self._shrink)
        return part if so_far is None else so_far.float().add_(part)
