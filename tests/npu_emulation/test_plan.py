"""Plans traced on fake tensors of an emulated card against those on the CPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.npu_emulation.conftest import Emulation


@pytest.mark.parametrize(
    ("words", "soc"),
    [
        (("parallel=fsdp_sp", "plan.device=ascend910b3", "model.npu_fused=true"), "Ascend910B3"),
        (("parallel=ddp", "plan.device=ascend910a", "precision=fp16"), "Ascend910A"),
    ],
    ids=["fused", "fp16 on 910A"],
)
def test_a_plan_on_npu_tensors_agrees_with_the_cpu_s(
    emulation: Emulation, tmp_path: Path, words: tuple[str, ...], soc: str
) -> None:
    # Wide enough for products to take their arithmetic's time and not that of a launch.
    wide = ("model.architecture.hidden_size=1024", "model.architecture.intermediate_size=2816")
    # One process for both, of which the first leaves nothing to the second.
    words = ("plan", "-m", "device=npu,cpu", "recipe=llama_tiny_32k", "data.max_length=4096", *wide, *words)
    done = emulation.lctrain(*words, "run_dir=plans", cwd=tmp_path, EMULATED_NPU_SOC=soc)
    assert done.returncode == 0, done.stderr
    npu, cpu = (json.loads((tmp_path / f"plans/{job}/plan.json").read_text(encoding="utf-8")) for job in (0, 1))
    assert (npu["traced_on"], cpu["traced_on"]) == ("npu", "cpu")
    assert npu["peak_bytes"] == pytest.approx(cpu["peak_bytes"], rel=0.01)
    for part in ("matmul_s", "attention_s"):
        assert npu["step"][part] == pytest.approx(cpu["step"][part], rel=0.01), part


@pytest.mark.parametrize(
    "machine",
    [
        {"EMULATED_NPU_COUNT": "0"},
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": ""},
    ],
    ids=["no card", "torch_npu turned off, without CANN"],
)
def test_a_plan_on_a_login_node(emulation: Emulation, tmp_path: Path, machine: dict[str, str]) -> None:
    """Recomputed on the CPU, which torch_npu would ask a card for; without what transformers would import."""
    words = ("plan", "recipe=llama_tiny_32k", "parallel=single", "data.max_length=2048", "plan.device=ascend910b3")
    done = emulation.lctrain(*words, "memory=full", "run_dir=run", cwd=tmp_path, **machine)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/plan.json").read_text(encoding="utf-8"))["traced_on"] == "cpu"
