"""The trainer's parts on emulated cards: attention, the parity table, overflow and checkpoints.

All that needs ranks is in this one file, so that the processes start once. The right answers are the CPU's: one rank,
the same weights, the same unequal token counts (tests/parity compares those with a bare loop).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
from lctrain.ops.npu_schemas import recorded
from tests.distributed import test_checkpoint as checkpoints
from tests.npu_emulation import bodies_attention, bodies_fused, bodies_training
from tests.npu_emulation.bodies_attention import Case
from tests.npu_emulation.conftest import Emulation
from tests.support.ranks import pool
from tests.support.run import train_tiny
from tests.support.tiny import tiny_config

STEPS = 3
ROWS = [
    (1, "single", ()),
    (2, "ddp", ()),
    (2, "fsdp", ("memory=full",)),
    (2, "fsdp_sp", ()),
    (2, "fsdp_cp", ("memory=selective",)),
    (2, "zero3", ()),
]
ROW_IDS = [layout for _, layout, _ in ROWS]
ONE, PACKED = (0, 24, 48), (0, 5, 24, 29, 30, 48)
ATTENTION = [
    (1, Case(ONE)),
    (1, Case(PACKED)),
    (2, Case(PACKED, sp=2)),
    (2, Case(ONE, cp=2)),
    (2, Case(PACKED, cp=2)),
    (2, Case(PACKED, cp=2, method="allgather")),
]


def plain_of(ranks: int, layout: str, *overrides: str) -> dict[str, Any]:
    """A row's config."""
    return to_plain(tiny_config(f"parallel={layout}", f"launch.nproc_per_node={ranks}", *overrides))


@lru_cache
def right() -> dict[str, Any]:
    """One CPU rank in fp32."""
    return pool(1).run(train_tiny, plain=plain_of(1, "single", "device=cpu"), steps=STEPS)[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 0.04), ("float16", 0.005)])
@pytest.mark.parametrize(("size", "case"), ATTENTION, ids=str)
def test_attention_equals_reference(emulation: Emulation, size: int, case: Case, dtype: str, tolerance: float) -> None:
    for found in emulation.ranks(size).run(bodies_attention.differences, case=case, dtype=dtype):
        assert max(found.values()) < tolerance, found


def test_the_op_ignores_a_sparse_mode_without_its_mask(emulation: Emulation) -> None:
    """Why the kernel always gives the mask: the emulation, like the op, computes full attention in silence."""
    from_causal, from_full = emulation.ranks(1).run(bodies_attention.ignores_sparse_mode_without_mask)[0]
    assert from_full < 1e-5 < from_causal


def test_the_op_refuses_what_it_documents_as_wrong(emulation: Emulation) -> None:
    answers = emulation.ranks(1).run(bodies_attention.refusals)[0]
    assert all(answer != "computed" for answer in answers), answers


@pytest.mark.parametrize(("ranks", "layout", "more"), ROWS, ids=ROW_IDS)
def test_fp32_equals_cpu(emulation: Emulation, ranks: int, layout: str, more: tuple[str, ...]) -> None:
    config = plain_of(ranks, layout, "device=npu", *more)
    for result in emulation.ranks(ranks).run(train_tiny, plain=config, steps=STEPS):
        np.testing.assert_allclose(result["loss"], right()["loss"], rtol=1e-5)
        np.testing.assert_allclose(result["grad_norm"], right()["grad_norm"], rtol=1e-5)
        assert result["parameters"].keys() == right()["parameters"].keys()
        for name, value in right()["parameters"].items():
            np.testing.assert_allclose(result["parameters"][name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("ranks", "layout", "more"), ROWS, ids=ROW_IDS)
def test_bf16_is_near_cpu(emulation: Emulation, ranks: int, layout: str, more: tuple[str, ...]) -> None:
    config = plain_of(ranks, layout, "device=npu", "precision=bf16", *more)
    result = emulation.ranks(ranks).run(train_tiny, plain=config, steps=STEPS)[0]
    np.testing.assert_allclose(result["loss"], right()["loss"], rtol=0.02)
    np.testing.assert_allclose(result["grad_norm"], right()["grad_norm"], rtol=0.1)
    assert all(value.dtype == np.float32 for value in result["parameters"].values())


def test_the_installed_operators_are_those_recorded(emulation: Emulation) -> None:
    version, found = emulation.ranks(1).run(bodies_training.signatures)[0]
    assert found == recorded()[version], "run tools/npu_schemas.py after reading what changed"


def test_fused_operators_equal_the_plain_ones(emulation: Emulation) -> None:
    """RMSNorm, SwiGLU and the rotary embedding of torch_npu, forward and backward, in a Hugging Face model."""
    found = emulation.ranks(1).run(bodies_fused.fused_equals_plain, device_type="npu")[0]
    assert len(found) > 10
    assert max(found.values()) < 1e-5, found


def test_the_selftest_s_rows_hold(emulation: Emulation) -> None:
    for rows in emulation.ranks(2).run(bodies_training.selftest_rows):
        assert len([row for row in rows if row.tolerance is not None]) > 20
        assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910A"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp_sp"])
def test_all_ranks_skip_an_fp16_overflow(emulation: Emulation, soc: str, layout: str) -> None:
    """On a chip with infinities, and on one that saturates and raises a flag."""
    config = plain_of(
        2, layout, "device=npu", "precision=fp16", "precision.initial_scale=64", "train.global_batch_size=8"
    )
    soc_of = {} if soc == "Ascend910B3" else {"EMULATED_NPU_SOC": soc}
    for result in emulation.ranks(2, **soc_of).run(bodies_training.overflow, plain=config):
        assert result == {"skipped": [False, True, False], "scales": [64, 32, 32], "changed": [False, True]}


@pytest.mark.parametrize("first", ["npu", "cpu"])
def test_checkpoints_cross_devices(emulation: Emulation, first: str, tmp_path: Path) -> None:
    """What fsdp_sp saves on one type of device, fsdp on the other reads bit for bit and continues."""
    pools = {"npu": emulation.ranks(2), "cpu": pool(2)}
    second = "cpu" if first == "npu" else "npu"
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    one = checkpoints.plain_of("fsdp_sp", 2, f"device={first}")
    other = checkpoints.plain_of("fsdp", 2, f"device={second}")
    wrote = pools[first].run(checkpoints._save, plain=one, folder=str(saved))[0]
    read = pools[second].run(checkpoints._load, plain=other, folder=str(saved), again=str(loaded))[0]
    assert checkpoints.same(wrote["parameters"], read["parameters"])
    assert checkpoints.same(wrote["optimizer"], read["optimizer"])
    np.testing.assert_allclose(read["norm"], wrote["norm"], rtol=1e-5)
    for name, value in wrote["after"].items():
        np.testing.assert_allclose(read["after"][name], value, atol=1e-5, err_msg=name)
