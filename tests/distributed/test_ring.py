"""Ring, all-gather, Ulysses and Ulysses in a ring against attention on one process, on random documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config


@dataclass(frozen=True)
class Case:
    """bounds: documents of `rows` equally long sequences. sp, cp: how the ranks split each of them."""

    bounds: tuple[int, ...]
    rows: int
    sp: int
    cp: int
    method: str = "ring"
    kernel: str = "sdpa"
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float32"
    scale: float = 0.4


@lru_cache
def _mesh(sp: int, cp: int) -> Any:
    """Made once on a rank: groups are not free."""
    from lctrain.config.sizes import Sizes
    from lctrain.runtime.device import Accelerator
    from lctrain.runtime.mesh import Mesh

    return Mesh(Sizes(1, 1, sp=sp, cp=cp), Accelerator("cpu", 0))


def layout_of(case: Case, kernel: Any) -> Any:
    """The attention the program would use."""
    from lctrain.config.parallel import CpMethod, FsdpUspConfig
    from lctrain.parallel.apply import attention_for

    return attention_for(kernel, FsdpUspConfig(cp_method=CpMethod[case.method]), _mesh(case.sp, case.cp))


def kernel_of(name: str) -> Any:
    import torch

    from lctrain.config.model import AttentionKernel
    from lctrain.ops.attention.select import select_kernel

    return select_kernel(AttentionKernel[name], "cpu", torch.float32)


def columns_of(case: Case) -> Any:
    """Which columns this rank holds."""
    import torch

    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.text_batch import TextBatch
    from lctrain.parallel.sequence import split_batch

    mesh = _mesh(case.sp, case.cp)
    numbers = torch.arange(case.bounds[-1] // case.rows)[None]
    batch = TextBatch(numbers, numbers, numbers, Documents(case.bounds), count=1, tokens=1)
    own = split_batch(batch, mesh.sp_rank, case.sp, cp_rank=mesh.cp_rank, cp_size=case.cp)
    return own.input_ids[0]


def inputs_of(case: Case) -> tuple[Any, ...]:
    """(documents, whole q, k, v and gradient of the output)."""
    import torch

    from lctrain.ops.attention.documents import Documents

    documents, length = Documents(case.bounds), case.bounds[-1] // case.rows
    generator = torch.Generator().manual_seed(case.bounds[-1] * 100 + case.heads)
    shapes = [(case.rows, length, h, 8) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    whole = [torch.randn(s, generator=generator).to(getattr(torch, case.dtype)) for s in shapes]
    return documents, *whole


def _errors(ranks: Any, cases: list[Case]) -> list[dict[str, float]]:
    """For each case, how far this rank's output, gradients and (of a ring) log-sum-exp are from one process's."""
    from functools import partial

    import torch

    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.keep import Kept, kept
    from lctrain.ops.attention.reference import ReferenceKernel

    results = []
    for case in cases:
        documents, *whole, grad = inputs_of(case)
        columns = columns_of(case)
        leaves = [x.float().requires_grad_() for x in whole]
        out = attend_batch(ReferenceKernel(), *leaves, documents, scale=case.scale)
        want = [x[:, columns] for x in (out, *torch.autograd.grad(out, leaves, grad.float()))]
        own = [x[:, columns].clone().requires_grad_() for x in whole]
        keeper = Kept()
        with keeper.recording():
            out = layout_of(case, kernel_of(case.kernel))(*own, documents, scale=case.scale)
        got = (out, *torch.autograd.grad(out, own, grad[:, columns]))
        assert all(x.dtype == y.dtype for x, y in zip(got, (whole[0], *whole), strict=True))
        errors = {
            name: ((a.float() - b).abs().max() / b.abs().max().clamp_min(1.0)).item()
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
        }
        if case.sp == 1:
            with keeper.replaying():
                _, lse = kept(partial(pytest.fail, "nothing was recorded"))
            assert lse.dtype == torch.float32
            _, right = ReferenceKernel().forward(*(x.float().flatten(0, 1) for x in whole), documents, scale=case.scale)
            right = right.unflatten(1, (case.rows, -1))[:, :, columns].flatten(1)
            errors["lse"] = (lse - right).abs().max().item()
        results.append(errors)
    return results


def worst(size: int, cases: list[Case]) -> list[dict[str, float]]:
    """The largest errors of any rank, case by case."""
    by_rank = pool(size).run(_errors, cases=cases)
    return [{name: max(r[name] for r in row) for name in row[0]} for row in zip(*by_rank, strict=True)]


LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(4, 1), (1, 4), (2, 2)]}


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    """Random boundaries: documents shorter than a chunk, longer than all of a rank's, on chunk edges and off them."""
    sp, cp = draw(st.sampled_from(LAYOUTS[size]))
    multiple = sp * (2 * cp if cp > 1 else 1)
    length = multiple * draw(st.integers(1, 5))
    rows = draw(st.integers(1, 2))
    bounds = {row * length for row in range(rows + 1)}
    for row in range(rows):
        bounds |= {row * length + b for b in draw(st.sets(st.integers(1, max(1, length - 1)), max_size=5))}
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (8, 1)]))
    kernel = draw(st.sampled_from(["sdpa", "sdpa", "reference", "flex"]))
    method = draw(st.sampled_from(["ring", "ring", "allgather"])) if cp > 1 else "ring"
    return Case(tuple(sorted(bounds)), rows, sp, cp, method, kernel, heads, kv_heads)


def _check(size: int, batch: list[Case]) -> None:
    for case, errors in zip(batch, worst(size, batch), strict=True):
        assert all(e < 5e-6 for e in errors.values()), (case, errors)


# One pool call takes a batch of cases: sending costs more than computing.
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(cases(2), min_size=12, max_size=12))
def test_two_ranks_on_random_documents(batch: list[Case]) -> None:
    _check(2, batch)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(cases(4), min_size=12, max_size=12))
def test_four_ranks_on_random_documents(batch: list[Case]) -> None:
    _check(4, batch)


PACKED = (0, 9, 40, 41, 64, 80, 128)  # two rows of 64


def test_kv_heads_and_28_query_heads_on_four_ranks() -> None:
    shapes = [(1, 4, "ring"), (1, 4, "allgather"), (4, 1, "ring"), (2, 2, "ring"), (2, 2, "allgather")]
    batch = [
        Case(PACKED, 2, sp, cp, method, heads=heads, kv_heads=kv_heads)
        for sp, cp, method in shapes
        for heads, kv_heads in ((8, 1), (8, 2), (8, 8), (28, 4))
    ]
    _check(4, batch)


@pytest.mark.parametrize("kernel", ["sdpa", "reference", "flex"])
def test_half_precision_inputs_give_near_results(kernel: str) -> None:
    """One document over both ranks, so that everything goes through the merge."""
    batch = [
        Case((0, 96), 1, 1, 2, method, kernel, dtype="bfloat16", scale=scale)
        for method in ("ring", "allgather")
        for scale in (0.4, 4.0)
    ]
    for case, errors in zip(batch, worst(2, batch), strict=True):
        # bf16 has 8 bits: gradients pass through it once or twice. The log-sum-exp must not pass through it at all.
        assert errors.pop("lse") < 1e-3, (case, errors)  # rounded to bf16 it would be off by 1e-2 or more
        assert all(e < 0.02 for e in errors.values()), (case, errors)


def _isolation(ranks: Any, plain: dict[str, Any]) -> tuple[float, float]:
    from lctrain.train.isolation import isolation_error
    from tests.support.run import build

    return isolation_error(build(ranks, plain)[1], vocabulary=97, length=48)


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ["parallel=fsdp_cp"]),
        (2, ["parallel=fsdp_cp", "model.attention=flex"]),
        (2, ["parallel=fsdp_cp", "parallel.cp_method=allgather"]),
        (2, ["parallel=fsdp_tp"]),
        (2, ["parallel=zero3_sp"]),
        (4, ["parallel=fsdp_usp", "parallel.sp_size=2"]),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_an_edit_moves_no_bit_of_another_document(size: int, overrides: list[str]) -> None:
    plain = to_plain(tiny_config(*overrides, f"launch.nproc_per_node={size}"))
    for others, own in pool(size).run(_isolation, plain=plain):
        assert others == 0.0
        assert own > 1e-3
