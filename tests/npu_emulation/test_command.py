"""The command line on emulated cards, in processes of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.npu_emulation.conftest import Emulation
from tests.support.command import column, lctrain, summary

# The right answers are those of one CPU rank, which also starts sooner than two.
ON_NPU, ON_CPU = ("device=npu", "run_dir=npu"), ("device=cpu", "parallel=single", "run_dir=cpu")
TINY = (
    "recipe=llama_tiny_32k",
    "data.max_length=2048",
    "train.max_steps=3",
    "eval.max_sequences=1",
    f"data.path={Path(asyncio.__file__).parent}",
)
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def test_a_real_run_gives_the_cpu_s_losses(emulation: Emulation, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    profiled = "logging.profile_steps=1"
    done = emulation.lctrain(*TINY, "parallel=fsdp_sp", *ON_NPU, profiled, cwd=tmp_path, EMULATED_NPU_LOG=str(log))
    assert done.returncode == 0, done.stderr
    # The emulation has no profiling library, so torch_npu's profiler writes what it knows without one.
    assert len(list((tmp_path / "npu/profile").glob("rank-*_ascend_pt/profiler_info*.json"))) == 2
    assert "2 x Ascend910B3" in done.stdout
    assert "environment: set HCCL_CONNECT_TIMEOUT=1800" in done.stdout
    assert lctrain(*TINY, *ON_CPU, cwd=tmp_path).returncode == 0
    for name in ("loss", "grad_norm"):
        right = column(tmp_path / "cpu", name)
        np.testing.assert_allclose(column(tmp_path / "npu", name), right, rtol=1e-5, err_msg=name)
    losses = [summary(tmp_path / run)["metrics"]["eval_loss"] for run in ("npu", "cpu")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    calls = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("calls.*"))
    assert all(line.startswith("EMULATED ") for line in calls.splitlines())
    for name in ("FlashAttentionScore layout=BSND", "FlashAttentionScoreGrad", "AlltoAll", "ReduceScatter"):
        assert name in calls
    assert "mask=0" not in calls, "a causal mode without its mask would be full attention"


def test_memory_that_runs_out_becomes_advice(emulation: Emulation, tmp_path: Path) -> None:
    words = (
        "recipe=llama_tiny_32k", "parallel=fsdp", "device=npu", "data.max_length=2048", "train.max_steps=1",
        "train.global_batch_size=8", "train.micro_batch_size=4", "memory=none", "run_dir=run",
    )  # fmt: skip
    done = emulation.lctrain(*words, cwd=tmp_path, EMULATED_NPU_MIB="60")
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "ran out of memory on Ascend910B3" in errors[0]
    assert "memory=full; train.micro_batch_size=2; parallel=fsdp_sp" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_lenet_trains_fifty_steps(emulation: Emulation, tmp_path: Path) -> None:
    words = (
        "recipe=lenet_fashion_mnist", "train.max_steps=50", "eval.max_sequences=500", "precision=fp32",
        "logging.pictures=false", "logging.every_steps=10", f"data.cache={tmp_path / 'images'}",
    )  # fmt: skip
    done = emulation.lctrain(*words, *ON_NPU, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lctrain(*words, *ON_CPU, cwd=tmp_path).returncode == 0
    ours, right = (np.array(column(tmp_path / run, "loss")) for run in ("npu", "cpu"))
    assert len(ours) == len(right) > 4
    assert ours[-1] < ours[0]
    np.testing.assert_allclose(ours, right, rtol=1e-3)


@pytest.mark.parametrize(
    ("extra", "words", "message"),
    [
        ({"EMULATED_NPU_SOC": "Ascend310P3"}, (), "cannot train"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_NPU_ALLOC_CONF": "a:1"}, (), "PYTORCH_NPU_ALLOC_CONF"),
        ({"EMULATED_NPU_SOC": "Ascend910A"}, ("parallel=zero3", "precision=fp16"), "overflow"),
    ],
    ids=["310P", "two allocator variables", "ZeRO in fp16 on 910A"],
)
def test_wrong_input_is_one_message(  # test_doctor.py has more of it
    emulation: Emulation, tmp_path: Path, extra: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    base = ("recipe=llama_tiny_32k", "device=npu", "parallel=fsdp", "run_dir=run")
    done = emulation.lctrain(*base, *words, cwd=tmp_path, **extra)
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert message in errors[0]
    assert not (tmp_path / "run").exists()
