"""The selftest's rows on two CPU ranks: all hold, and a kernel or a message that is wrong is seen."""

from __future__ import annotations

from typing import Any

import pytest

from lctrain.config.plain import to_plain
from lctrain.config.root import TrainConfig
from tests.support.ranks import pool
from tests.support.tiny import tiny_config


def _config(size: int) -> TrainConfig:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    words = ("parallel=ddp", f"launch.nproc_per_node={size}", f"train.global_batch_size={2 * size}")
    return tiny_config(*words, architecture=heads)


def _parity(ranks: Any, plain: dict[str, Any], wrong: bool) -> list[Any]:
    import torch
    import torch.distributed as dist

    from lctrain.config.plain import from_plain
    from lctrain.selftest import parity
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag

    session = Session(from_plain(plain), ranks, dist.HashStore(), StopFlag())
    session.log = lambda line: None  # type: ignore[assignment]
    original = parity.set_first_weights

    def other_weights(model: Any, *args: Any, **kwargs: Any) -> Any:
        digest = original(model, *args, **kwargs)
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "q_proj" in name).mul_(1.5)
        return digest

    if wrong:
        parity.set_first_weights = other_weights
    try:
        return list(parity.parity_rows(session))
    finally:
        parity.set_first_weights = original


@pytest.mark.parametrize("size", [1, 2])
def test_every_layout_equals_one_rank(size: int) -> None:
    rows = pool(size).run(_parity, plain=to_plain(_config(size)), wrong=False)[0]
    kinds = {row.name.split(",")[0] for row in rows}
    assert kinds == ({"single", "fsdp"} if size == 1 else {"ddp", "fsdp", "fsdp_sp", "fsdp_cp", "zero3"})
    assert [row for row in rows if not row.ok] == []


def test_other_weights_are_seen() -> None:
    rows = pool(1).run(_parity, plain=to_plain(_config(1)), wrong=True)[0]
    assert all(not row.ok for row in rows if "fp32" in row.name)


def _rows(ranks: Any) -> list[Any]:
    from lctrain.runtime.device import Accelerator
    from lctrain.selftest.collectives import collective_rows
    from lctrain.selftest.kernels import kernel_rows

    device = Accelerator("cpu", 0)
    return [*kernel_rows(device), *collective_rows(device)]


def test_kernels_and_collectives_of_a_cpu_hold() -> None:
    for rows in pool(2).run(_rows):
        assert [row for row in rows if not row.ok] == []
        compared = [row for row in rows if row.tolerance is not None]
        assert {row.section for row in compared} == {"attention kernels", "collectives"}
        assert len(compared) == 3 * 3 * 2 + 5 * 4
        assert any(row.name == "flash" and "not here" in row.detail for row in rows)


def _spoilt(ranks: Any) -> list[Any]:
    import torch.distributed as dist

    from lctrain.runtime.device import Accelerator
    from lctrain.selftest.collectives import collective_rows

    original = dist.all_reduce
    dist.all_reduce = lambda x, **kwargs: x.add_(1)
    try:
        return list(collective_rows(Accelerator("cpu", 0)))
    finally:
        dist.all_reduce = original


def test_a_wrong_sum_is_seen() -> None:
    # Of two ranks the first sees it: 1 + 1 instead of 1 + 2.
    rows = pool(2).run(_spoilt)[0]
    assert {row.name.split(",")[0] for row in rows if not row.ok} == {"all-reduce"}


def _one_is_broken(ranks: Any) -> list[Any]:
    """Rows of kernels as the report has them, when the last rank's sdpa gives gradients that are no numbers."""
    from types import SimpleNamespace

    from torch.distributed.distributed_c10d import _get_default_store

    from lctrain.ops.attention.sdpa import SdpaKernel
    from lctrain.runtime.device import Accelerator
    from lctrain.selftest import job
    from lctrain.selftest.kernels import kernel_rows

    original = SdpaKernel.backward

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv = original(*args, **kwargs)
        return dq, dk * float("nan"), dv

    if ranks.rank == ranks.world_size - 1:
        SdpaKernel.backward = spoilt
    try:
        found = list(kernel_rows(Accelerator("cpu", 0)))
    finally:
        SdpaKernel.backward = original
    session: Any = SimpleNamespace(ranks=ranks, store=_get_default_store())
    return job._everywhere(session, 0, found)


def test_a_broken_card_that_is_not_the_first_is_seen() -> None:
    rows = pool(2).run(_one_is_broken)[0]
    assert {row.name.split(",")[0] for row in rows if not row.ok} == {"sdpa"}
    assert all(row.detail == "rank 1: largest in dk" for row in rows if not row.ok)


def _raising(ranks: Any) -> list[Any]:
    from lctrain.ops.attention.sdpa import SdpaKernel
    from lctrain.runtime.device import Accelerator
    from lctrain.selftest.kernels import kernel_rows

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("EZ9999: inner error\nand a stack")

    original, SdpaKernel.forward = SdpaKernel.forward, fails
    try:
        return list(kernel_rows(Accelerator("cpu", 0)))
    finally:
        SdpaKernel.forward = original


def test_a_kernel_that_fails_is_a_row_and_not_the_end() -> None:
    rows = pool(1).run(_raising)[0]
    assert {row.name.split(",")[0] for row in rows if not row.ok} == {"sdpa"}
    assert all(row.detail == "EZ9999: inner error" for row in rows if not row.ok)
