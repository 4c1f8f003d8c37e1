"""One rank's share of attention over a split sequence, block by block, with any kernel.

Legend: t this rank's rows (all its columns of all sequences), H query heads, K key/value heads, D head dim,
P = 2 (keys, values).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Kernel
from lctrain.parallel.zigzag import Rectangle, local_documents, ring_rectangles


class Blocks:
    """Kernel calls on blocks of one rank's attention, accumulated in fp32."""

    def __init__(self, kernel: Kernel, documents: Documents, rows: int, scale: float, rank: int, size: int) -> None:
        self.kernel, self.documents, self.rows, self.scale = kernel, documents, rows, scale
        self.rank, self.size = rank, size
        self.own = local_documents(documents, rows, rank, size)

    def from_source(self, source: int) -> tuple[Rectangle, ...]:
        """Rectangles against the keys of rank `source`."""
        return ring_rectangles(self.documents, self.rows, self.rank, source, self.size)

    def forward_own(self, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The causal triangles inside this rank's chunks: (out_tHD fp32, lse_Ht)."""
        out, lse = self.kernel.forward(q, kv[0], kv[1], self.own, scale=self.scale)
        return out.float(), lse.clone(memory_format=torch.contiguous_format)

    def forward_add(
        self, q: torch.Tensor, kv: torch.Tensor, rectangles: Sequence[Rectangle], out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Merge rectangles into `out` and `lse` in place, weighing each part by its share of the softmax sum."""
        if not rectangles:
            return
        q_rows, k_rows, documents = _gather_plan(rectangles)
        part, part_lse = self.kernel.forward(
            _take(q, q_rows), _take(kv[0], k_rows), _take(kv[1], k_rows), documents[0],
            scale=self.scale, causal=False, kv_documents=documents[1],
        )  # fmt: skip
        done = 0
        for rows in q_rows:
            width = rows.stop - rows.start
            new, new_lse = part[done : done + width], part_lse[:, done : done + width]
            total = torch.logaddexp(lse[:, rows], new_lse)
            out[rows] *= (lse[:, rows] - total).exp().t().unsqueeze(-1)
            out[rows] += new * (new_lse - total).exp().t().unsqueeze(-1)
            lse[:, rows] = total
            done += width

    def backward_own(self, saved: Saved, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(dq_tHD, dkv_PtKD) of the causal triangles, fp32."""
        dq, dk, dv = self.kernel.backward(
            saved.grad, saved.q, kv[0], kv[1], saved.out, saved.lse, self.own, scale=self.scale
        )
        return dq.float(), torch.stack((dk, dv)).float()

    def backward_add(
        self,
        saved: Saved,
        kv: torch.Tensor,
        rectangles: Sequence[Rectangle],
        dq: torch.Tensor,
        dkv: torch.Tensor,
    ) -> None:
        """Add the gradients of rectangles to `dq` and `dkv` in place."""
        if not rectangles:
            return
        q_rows, k_rows, documents = _gather_plan(rectangles)
        parts = self.kernel.backward(
            _take(saved.grad, q_rows), _take(saved.q, q_rows), _take(kv[0], k_rows), _take(kv[1], k_rows),
            _take(saved.out, q_rows), torch.cat([saved.lse[:, r] for r in q_rows], dim=1), documents[0],
            scale=self.scale, causal=False, kv_documents=documents[1],
        )  # fmt: skip
        _add_rows(dq, parts[0], q_rows)
        _add_rows(dkv[0], parts[1], k_rows)
        _add_rows(dkv[1], parts[2], k_rows)


class Saved:
    """What every block's backward needs: queries, the global output and log-sum-exp, and the output's gradient."""

    def __init__(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> None:
        self.q, self.out, self.lse, self.grad = q, out, lse, grad.contiguous()


def _gather_plan(rectangles: Sequence[Rectangle]) -> tuple[list[slice], list[slice], tuple[Documents, Documents]]:
    q_rows = [slice(r.q_start, r.q_end) for r in rectangles]
    k_rows = [slice(r.k_start, r.k_end) for r in rectangles]
    lengths = [Documents.from_lengths(r.stop - r.start for r in rows) for rows in (q_rows, k_rows)]
    return q_rows, k_rows, (lengths[0], lengths[1])


def _take(x: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """Rows of x; a view when there is one run of them."""
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[r] for r in rows])


def _add_rows(target: torch.Tensor, values: torch.Tensor, rows: Sequence[slice]) -> None:
    done = 0
    for r in rows:
        width = r.stop - r.start
        target[r] += values[done : done + width]
        done += width
