"""The parity table on emulated cards: the trainer's layouts through torch_npu, hccl and the fused attention kernel.

The right answer is the CPU's: one rank, the same weights, the same unequal token counts (tests/parity compares that
with a bare loop).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
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


def plain(ranks: int, layout: str, *overrides: str) -> dict[str, Any]:
    """A row's config."""
    return to_plain(tiny_config(f"parallel={layout}", f"launch.nproc_per_node={ranks}", *overrides))


@lru_cache
def right(precision: str) -> dict[str, Any]:
    """One CPU rank."""
    return pool(1).run(train_tiny, plain=plain(1, "single", f"precision={precision}", "device=cpu"), steps=STEPS)[0]


@pytest.mark.parametrize(("ranks", "layout", "more"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_fp32_equals_cpu(emulation: Emulation, ranks: int, layout: str, more: tuple[str, ...]) -> None:
    config = plain(ranks, layout, "device=npu", *more)
    for result in emulation.ranks(ranks).run(train_tiny, plain=config, steps=STEPS):
        np.testing.assert_allclose(result["loss"], right("fp32")["loss"], rtol=1e-5)
        np.testing.assert_allclose(result["grad_norm"], right("fp32")["grad_norm"], rtol=1e-5)
        assert result["parameters"].keys() == right("fp32")["parameters"].keys()
        for name, value in right("fp32")["parameters"].items():
            np.testing.assert_allclose(result["parameters"][name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("ranks", "layout", "more"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_bf16_is_near_cpu(emulation: Emulation, ranks: int, layout: str, more: tuple[str, ...]) -> None:
    config = plain(ranks, layout, "device=npu", "precision=bf16", *more)
    result = emulation.ranks(ranks).run(train_tiny, plain=config, steps=STEPS)[0]
    np.testing.assert_allclose(result["loss"], right("fp32")["loss"], rtol=0.02)
    np.testing.assert_allclose(result["grad_norm"], right("fp32")["grad_norm"], rtol=0.1)
    assert all(value.dtype == np.float32 for value in result["parameters"].values())
