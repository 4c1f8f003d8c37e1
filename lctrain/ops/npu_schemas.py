"""Signatures of the operators of torch_npu that this package calls, as they were when it was tested with them.

A release that takes an argument away or moves one would compute something else, or fail in the middle of a job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).with_name("npu_schemas.json")
CALLED = (
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
)


def installed() -> tuple[str, dict[str, str]]:
    """(version, signature by operator) of the torch_npu that is installed; "" where it has no such operator."""
    import torch_npu

    return torch_npu.__version__.partition("+")[0], {name: _signature(name) for name in CALLED}


def recorded() -> dict[str, dict[str, str]]:
    """Signatures by operator, by version of torch_npu, the newest last."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def differences() -> list[str]:
    """How the installed operators differ from those recorded: of the same version, or else of the newest."""
    version, found = installed()
    known = recorded()
    tested = version if version in known else list(known)[-1]
    return [
        f"{name} of torch_npu {version} is {found[name] or 'not there'}, and was {signature} in {tested}"
        for name, signature in known[tested].items()
        if found[name] != signature
    ]


def record() -> str:
    """Write the installed version's signatures beside the others; returns the version."""
    version, found = installed()
    known: dict[str, Any] = recorded() | {version: found}
    ordered = {v: known[v] for v in sorted(known, key=lambda v: [int(part) for part in v.split(".") if part.isdigit()])}
    RECORDED.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")
    return version


def _signature(name: str) -> str:
    operator = getattr(torch.ops.npu, name, None)
    return "" if operator is None else str(operator.default._schema)
