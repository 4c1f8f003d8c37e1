"""An fp16 overflow on one rank skips the step on all of them and halves the scale of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config


def _overflow(ranks: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """A good step, one whose gradient overflows on the last rank only, and a good one."""
    from tests.support.run import build
    from tests.support.steps import parameters_of, take_steps

    def spoil(step: int, loss: Any) -> Any:
        return loss * float("inf") if step == 1 and ranks.rank == ranks.world_size - 1 else loss

    _, language = build(ranks, plain)
    scale = language.engine.scale
    results, scales, parameters = [], [], []
    for step in range(3):
        results += take_steps(language, 1, start=step, spoil=spoil)
        scales.append(scale.value)
        parameters.append(parameters_of(language))
    moments = len(language.engine.optimizer.state)
    return {
        "skipped": [r.skipped for r in results],
        "norms": [r.grad_norm for r in results],
        "scales": scales,
        "parameters": parameters,
        "moments": moments,
    }


@pytest.mark.parametrize(
    ("size", "layout"), [(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "hsdp"), (2, "fsdp_sp"), (2, "fsdp_cp")]
)
def test_all_ranks_skip_together(size: int, layout: str) -> None:
    plain = to_plain(
        tiny_config(
            f"parallel={layout}",
            "precision=fp16",
            "precision.initial_scale=64",
            "train.global_batch_size=8",
            f"launch.nproc_per_node={size}",
        )
    )
    results = pool(size).run(_overflow, plain=plain)
    for result in results:
        assert result["skipped"] == [False, True, False]
        assert result["scales"] == [64, 32, 32]
        assert not np.isfinite(result["norms"][1])
        first, second, third = result["parameters"]
        assert all(np.array_equal(first[n], second[n]) for n in first)
        assert any(not np.array_equal(second[n], third[n]) for n in first)
        assert all(np.isfinite(v).all() for v in third.values())
        for name, value in results[0]["parameters"][2].items():
            assert np.array_equal(value, third[name]), name
    assert len({r["norms"][2] for r in results}) == 1
