"""The doctor and the trainer on emulated cards: what is right passes, and each thing planted is named with its mend."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.npu_emulation.conftest import Emulation
from tests.support.command import LIMIT_S

NO_CANN = {"LD_LIBRARY_PATH": "", "ASCEND_HOME_PATH": "", "ASCEND_OPP_PATH": ""}
BOTH = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
INFERENCE = {"EMULATED_NPU_SOC": "Ascend310P3"}
FIRST_910 = {"EMULATED_NPU_SOC": "Ascend910A"}


def run(emulation: Emulation, folder: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python -m lctrain WORDS` in `folder`."""
    return subprocess.run(
        [emulation.python, "-m", "lctrain", *words],
        cwd=folder,
        env=emulation.environment(**extra),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def other_torch_npu(emulation: Emulation, tmp_path: Path) -> dict[str, str]:
    """A path on which pip's records of a torch_npu for another torch come first."""
    folder = tmp_path / "packages" / "torch_npu-2.12.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.12.0\nRequires-Dist: torch==2.12.0.*\n"
    )
    return {"PYTHONPATH": f"{folder.parent}:{emulation.environment()['PYTHONPATH']}"}


def lines(done: subprocess.CompletedProcess[str], level: str) -> list[str]:
    """The report's lines of one level."""
    return [line for line in done.stdout.splitlines() if line.startswith(f"{level} ")]


def test_a_machine_that_is_right(emulation: Emulation, tmp_path: Path) -> None:
    done = run(emulation, tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("doctor: device=npu\n")
    assert lines(done, "fault") == []
    assert "2 x Ascend910B3, GiB free: " in done.stdout
    assert "Ascend910B3 computes in bf16" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_warnings_are_no_fault(emulation: Emulation, tmp_path: Path) -> None:
    done = run(
        emulation, tmp_path, "doctor", "device=npu", HCCL_CONNECT_TIMEOUT="120", HCCL_EXEC_TIMEOUT="1836", **FIRST_910
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = "\n".join(lines(done, "warning"))
    assert "Ascend910A has no bf16 arithmetic" in text
    assert "use precision=fp16" in text
    assert "HCCL_CONNECT_TIMEOUT=120 is below 600 s" in text
    assert "HCCL_EXEC_TIMEOUT=1836 is not below launch.timeout_s" in text


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (NO_CANN, ["the loader does not find libascendcl.so; source CANN's set_env.sh"]),
        (BOTH, ["PYTORCH_ALLOC_CONF=expandable_segments:True are both set"]),
        (INFERENCE, ["Ascend310P3 is an inference card and cannot train; run on an Ascend 910"]),
        # Two that have nothing to do with each other, in the order of the report.
        (
            {"EMULATED_NPU_COUNT": "0", "HCCL_EXEC_TIMEOUT": "soon"},
            ["no npu device is visible; check the driver", "HCCL_EXEC_TIMEOUT=soon is not a whole number"],
        ),
    ],
    ids=["no CANN", "both allocator variables", "310P", "no card, execution timeout"],
)
def test_faults(emulation: Emulation, tmp_path: Path, planted: dict[str, str], named: list[str]) -> None:
    done = run(emulation, tmp_path, "doctor", **planted)
    assert done.returncode == 3, done.stdout + done.stderr
    for line, text in zip(lines(done, "fault"), named, strict=True):
        assert text in line


def test_a_pair_that_does_not_fit(emulation: Emulation, tmp_path: Path, other_torch_npu: dict[str, str]) -> None:
    done = run(emulation, tmp_path, "doctor", **other_torch_npu)
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = lines(done, "fault")
    assert "torch_npu 2.12.0 needs torch 2.12.0 and torch 2.13.0" in line
    assert "pip install torch_npu==2.13.0" in line
    refused = train(emulation, tmp_path, **other_torch_npu)
    assert "device=npu: torch_npu 2.12.0 needs torch 2.12.0" in refused


def train(emulation: Emulation, folder: Path, *words: str, **extra: str) -> str:
    """The one line with which the trainer refuses to start."""
    done = run(
        emulation, folder, "recipe=llama_tiny_32k", "device=npu", "parallel=single", "data.max_length=512",
        "train.max_steps=1", "plan.at_start=false", *words, **extra,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert not (folder / "outputs").exists()
    return line


@pytest.mark.parametrize(
    ("words", "planted", "said", "mend"),
    [
        ([], NO_CANN, "torch_npu cannot be imported (libhccl.so of CANN is not found)", "source CANN's set_env.sh"),
        (["precision=bf16"], FIRST_910, "precision=bf16 but Ascend910A has no bf16 arithmetic", "use precision=fp16"),
    ],
    ids=["no CANN", "bf16 on 910A"],
)
def test_the_trainer_refuses(
    emulation: Emulation, tmp_path: Path, words: list[str], planted: dict[str, str], said: str, mend: str
) -> None:
    line = train(emulation, tmp_path, *words, **planted)
    assert said in line
    assert mend in line
