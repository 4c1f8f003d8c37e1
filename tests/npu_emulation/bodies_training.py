"""What ranks run on emulated cards beside attention: steps that overflow, and the selftest's rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def overflow(ranks: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Three fp16 steps, the second with gradients out of fp16's range on the last rank only."""
    from tests.support.run import build
    from tests.support.steps import parameters_of, take_steps

    def spoil(step: int, loss: Any) -> Any:
        return loss * 2.0**40 if step == 1 and ranks.rank == ranks.world_size - 1 else loss

    _, language = build(ranks, plain)
    results, scales, parameters = [], [], []
    for step in range(3):
        results += take_steps(language, 1, start=step, spoil=spoil)
        scales.append(language.engine.scale.value)
        parameters.append(parameters_of(language))
    changed = [any((a[name] != b[name]).any() for name in a) for a, b in pairwise(parameters)]
    return {"skipped": [r.skipped for r in results], "scales": scales, "changed": changed}


def selftest_rows(ranks: Any) -> list[Any]:
    """What a selftest finds of kernels, fused operators and collectives."""
    from lctrain.runtime.device import Accelerator
    from lctrain.selftest.collectives import collective_rows
    from lctrain.selftest.fused import fused_rows
    from lctrain.selftest.kernels import kernel_rows

    device = Accelerator("npu", ranks.rank)
    return [*kernel_rows(device), *fused_rows(device), *collective_rows(device)]


def signatures(ranks: Any) -> tuple[str, dict[str, str]]:
    """Of torch_npu's operators that the package calls."""
    from lctrain.ops.npu_schemas import installed

    return installed()
