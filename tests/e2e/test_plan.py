"""The plan verb: what it answers, what it writes, what it refuses, and that it is right where it can be checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lctrain import cli
from lctrain.errors import EXIT_NO, EXIT_OK, EXIT_USER
from lctrain.plan.memory import CATEGORIES
from tests.support.command import LIMIT_S, end, environment, lctrain

TINY = ["recipe=llama_tiny_32k", "data.max_length=256"]
SEVEN_B = ["recipe=llama7b_32k", "plan.device=ascend910b3", "plan.world_size=8"]
CORE_S = 60.0
MEMORY_GIB = 4.0
OWN = """
title: My card
type: cuda
memory_gib: 48
usable_gib: 46.5
peak_tflops: {fp32: 100}
bandwidth_tb_s: 0.9
link_gb_s: 32
latency_us: 15
"""

Plan = Callable[..., tuple[int, str, str]]


def read(run_dir: Path) -> dict[str, Any]:
    """plan.json of a run directory, whose sums must be right wherever there are any."""
    record: dict[str, Any] = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    assert sum(record["breakdown"].values()) == record["peak_bytes"]
    assert sum(record["breakdown"][name] for name in CATEGORIES) == record["tensor_bytes"]
    assert record["headroom_bytes"] == record["usable_bytes"] - record["peak_bytes"]
    assert record["fits"] == (record["headroom_bytes"] >= 0)
    assert record["step_time_s"] > 0
    return record


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder outside any launcher."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def plan(here: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """`python -m lctrain plan WORDS` in this process: (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def refused(plan: Plan, here: Path, *words: str) -> str:
    """What is said of wrong words: one message, exit 2, nothing written."""
    code, _, error = plan(*words)
    assert code == EXIT_USER
    assert error.startswith("error: ")
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    assert not list(here.iterdir())
    return error


# Answers.


class Measured:
    """A command run to its end. seconds: of a core, so that a busy machine says nothing. memory_gib: the most held."""

    def __init__(self, *words: str, cwd: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_RUSAGE, "plan", *words],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stop = threading.Timer(LIMIT_S, end, [process])
        stop.start()
        self.out, self.err = process.communicate()
        stop.cancel()
        self.code = process.returncode
        *_, last = self.err.splitlines()
        kibibytes, seconds = last.split()
        self.memory_gib = int(kibibytes) / 2**20
        self.seconds = float(seconds)


_WITH_RUSAGE = """
import resource, sys
from lctrain.cli import main
code = main(sys.argv[1:])
used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(u.ru_maxrss for u in used), sum(u.ru_utime + u.ru_stime for u in used), file=sys.stderr)
sys.exit(code)
"""


def test_ddp_of_7b_at_32k_does_not_fit_and_the_command_says_why(tmp_path: Path) -> None:
    done = Measured(*SEVEN_B, "parallel=ddp", f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.code == EXIT_NO, done.out + done.err
    assert done.seconds < CORE_S
    assert done.memory_gib < MEMORY_GIB
    record = read(tmp_path / "run")
    assert record["fits"] is False
    assert record["usable_bytes"] == 61 * 2**30
    # fp32 master, gradient and moments: 16 bytes a number of state, beside which stand bf16 weights and activations.
    state = sum(record["breakdown"][n] for n in ("master_weights", "gradients", "optimizer_state"))
    assert state == pytest.approx(16 * 6.738e9, rel=0.01)
    assert record["breakdown"]["parameters"] <= 2 * 6.739e9
    by_hand = record["by_hand"]
    assert [round(by_hand[n] / 1e9) for n in ("weights", "gradients", "master_weights", "optimizer_state")] == [
        13, 13, 27, 54,
    ]  # fmt: skip
    assert "by hand (weights + gradients + master + optimizer): 13.48 + 13.48 + 26.95 + 53.91 = 107.81 GB" in done.out
    assert "does not fit: " in done.out


def test_full_sharding_with_ulysses_of_7b_at_32k_fits_in_the_stated_time_and_memory(tmp_path: Path) -> None:
    done = Measured(*SEVEN_B, "parallel=fsdp_sp", f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.code == EXIT_OK, done.out + done.err
    assert done.seconds < CORE_S
    assert done.memory_gib < MEMORY_GIB
    record = read(tmp_path / "run")
    assert record["fits"] is True
    assert (record["layout"], record["recompute"], record["world_size"]) == ("fsdp_sp", "full", 8)
    assert record["peak_bytes"] < record["usable_bytes"] == 61 * 2**30
    assert record["tokens_per_s"] == pytest.approx(8 * 32768 / record["step_time_s"])
    assert 0 < record["mfu"] < 1
    assert set(record["breakdown"]) > set(CATEGORIES)
    assert record["breakdown"]["communicators"] > 0
    # A rank's share of 4 bytes of master weight and 8 of moments for each of 6.74 billion numbers.
    assert record["breakdown"]["master_weights"] == pytest.approx(4 * 6.738e9 / 8, rel=0.01)
    assert record["breakdown"]["optimizer_state"] == pytest.approx(8 * 6.738e9 / 8, rel=0.01)
    for words in ("activations kept", "communicators' buffers", "headroom", "all_to_all", "MFU"):
        assert words in done.out
    assert f"fits: {record['peak_bytes'] / 2**30:.2f} GiB of 61.00 GiB" in done.out


def test_a_plan_is_printed_written_and_drawn(plan: Plan, here: Path) -> None:
    code, out, error = plan(*TINY, "parallel=fsdp", "plan.device=a100", "plan.world_size=4",
                            "train.global_batch_size=4", "run_dir=run")  # fmt: skip
    assert (code, error) == (EXIT_OK, "")
    assert out.splitlines()[-1] == "run dir: run"
    assert out.splitlines()[0].startswith("llama_tiny_32k: ")
    record = read(here / "run")
    assert (record["world_size"], record["device"], record["layout"]) == (4, "a100", "fsdp")
    assert (here / "run" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in here.iterdir()] == ["run"]


def test_what_the_command_line_says_of_a_device_decides(plan: Plan, here: Path) -> None:
    words = [*TINY, "parallel=single", "plan.device=a100"]
    assert plan(*words, "plan.usable_gib=0.5", "run_dir=small")[0] == EXIT_NO
    assert plan(*words, "plan.peak_tflops=1", "plan.bandwidth_tb_s=0.01", "run_dir=slow")[0] == EXIT_OK
    assert plan(*words, "run_dir=plain")[0] == EXIT_OK
    small, slow, plain = (read(here / name) for name in ("small", "slow", "plain"))
    assert small["usable_bytes"] == 2**29
    assert small["peak_bytes"] == slow["peak_bytes"] == plain["peak_bytes"]
    assert slow["step_time_s"] > 5 * plain["step_time_s"]


def test_a_device_of_ones_own(plan: Plan, here: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(OWN)
    words = [*TINY, "parallel=single", "plan.device=mine"]
    code, out, _ = plan("--config-dir", str(tmp_path / "conf"), *words, "run_dir=run")
    assert code == EXIT_OK
    assert "on 1 x My card" in out
    assert read(here / "run")["usable_bytes"] == int(46.5 * 2**30)


def test_the_machine_at_hand_is_what_is_planned_for_when_none_is_named(plan: Plan, here: Path) -> None:
    assert plan(*TINY, "parallel=ddp", "device=cpu", "run_dir=run")[0] == EXIT_OK
    record = read(here / "run")
    assert (record["device"], record["world_size"]) == ("cpu", 2)


def test_days_and_cost(plan: Plan, here: Path) -> None:
    code, out, _ = plan(*TINY, "parallel=fsdp", "plan.device=h100", "plan.dataset_size=1e12", "plan.price_per_hour=3",
                        "run_dir=run")  # fmt: skip
    assert code == EXIT_OK
    record = read(here / "run")
    assert record["days"] == pytest.approx(1e12 / record["tokens_per_s"] / 86400)
    assert record["cost"] == pytest.approx(record["days"] * 24 * 2 * 3)
    assert f"the whole job {record['days']:.2f} days" in out


def test_image_recipes_plan(plan: Plan, here: Path) -> None:
    code, out, _ = plan("recipe=resnet8_fashion_mnist", "plan.device=v100", "train.micro_batch_size=64",
                        "run_dir=run")  # fmt: skip
    assert code == EXIT_OK
    assert "BatchNorm sees 64 of a step's 256 at once" in out
    assert read(here / "run")["samples_per_s"] > 0


def test_resnet50_in_fp32_runs_out_of_a_card_that_its_mixed_job_fits(plan: Plan, here: Path) -> None:
    """The batch of 256 of the recipe on one 32 GB card less what fp32 activations take."""
    words = ["recipe=resnet50_imagenet", "data.source=unread", "plan.device=v100", "plan.usable_gib=20"]
    words += ["train.global_batch_size=2048"]
    assert plan(*words, "precision=fp16", "run_dir=half")[0] == EXIT_OK
    assert plan(*words, "precision=fp32", "run_dir=full")[0] == EXIT_NO
    half, full = read(here / "half"), read(here / "full")
    assert full["breakdown"]["activations"] == pytest.approx(2 * half["breakdown"]["activations"], rel=0.05)


def test_layouts_are_compared_and_ranked(tmp_path: Path) -> None:
    done = lctrain("plan", *TINY, "plan.layouts=[ddp,fsdp]", "plan.device=a100", "run_dir=run", cwd=tmp_path)
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    record = read(tmp_path / "run")
    layouts = record["layouts"]
    assert {entry["layout"] for entry in layouts} == {"ddp", "fsdp"}
    assert {entry["recompute"] for entry in layouts} == {"offload", "full", "selective", "none"}
    assert len(layouts) == 8
    assert all(entry["fits"] for entry in layouts)
    speeds = [entry["tokens_per_s"] for entry in layouts]
    assert speeds == sorted(speeds, reverse=True)
    assert record["tokens_per_s"] == speeds[0]
    assert f"fastest that fits: {' '.join(layouts[0]['words'])}" in done.stdout
    assert "2 of 2: parallel=" in done.stdout


def test_layouts_none_of_which_fits(plan: Plan, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lctrain.plan import layouts

    outcome = layouts.Outcome(("parallel=ddp",), reason="112.0 GB of state a rank")
    monkeypatch.setattr(layouts, "compare", lambda *given: [outcome])
    code, out, _ = plan(*TINY, "plan.layouts=[ddp]", "plan.device=a100", "run_dir=run")
    assert code == EXIT_NO
    assert "parallel=ddp  no: 112.0 GB of state a rank" in out
    assert "nothing fits: " in out
    record = json.loads((here / "run" / "plan.json").read_text())
    assert record["fits"] is False
    assert record["layouts"] == [{"words": ["parallel=ddp"], "reason": "112.0 GB of state a rank"}]


def test_a_sweep_of_plans(plan: Plan, here: Path) -> None:
    code, out, _ = plan("-m", *TINY, "parallel=ddp,fsdp", "plan.device=a100", "plan.usable_gib=1.2", "run_dir=sweep")
    assert code == EXIT_OK
    first, second = (read(here / "sweep" / number) for number in "01")
    assert (first["layout"], second["layout"]) == ("ddp", "fsdp")
    assert first["peak_bytes"] > second["peak_bytes"]
    assert "sweep dir: sweep" in out


def test_the_longest_sequence(plan: Plan, here: Path) -> None:
    code, out, _ = plan(*TINY, "parallel=fsdp", "memory=full", "plan.device=a100", "plan.usable_gib=0.86",
                        "plan.max_length=auto", "run_dir=run")  # fmt: skip
    assert code == EXIT_OK
    record = read(here / "run")
    assert record["fits"]
    assert record["max_length"] % 1024 == 0
    assert record["max_length"] > 2048
    assert f"longest sequence that fits: data.max_length={record['max_length']} " in out


def test_changes_that_make_a_job_fit_do(plan: Plan, here: Path) -> None:
    job = ["recipe=llama_tiny_32k", "data.max_length=2048", "parallel=ddp", "memory=none"]
    device = ["plan.device=a100", "plan.usable_gib=0.838"]  # of which 0.795 are the context and two communicators
    code, out, _ = plan(*job, *device, "plan.fit=true", "run_dir=run")
    assert code == EXIT_OK
    changes = read(here / "run")["changes"]
    assert changes
    assert f"add: {' '.join(changes)}" in out
    assert plan(*job, *device, "run_dir=before")[0] == EXIT_NO
    assert plan(*job, *device, *changes, "run_dir=after")[0] == EXIT_OK


def test_a_job_that_fits_needs_no_change(plan: Plan, here: Path) -> None:
    code, out, _ = plan(*TINY, "parallel=ddp", "plan.device=a100", "plan.fit=true", "run_dir=run")
    assert code == EXIT_OK
    assert "nothing to change" in out
    assert read(here / "run")["changes"] == []


# Accuracy.


@pytest.mark.parametrize("layout", ["single", "fsdp", "fsdp_sp"])
def test_predicted_memory_is_the_measured(layout: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = lctrain(
        "plan", "recipe=llama_tiny_32k", "data.max_length=2048", f"parallel={layout}", "device=cpu",
        "plan.calibrate=true", f"run_dir={run_dir}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    record = read(run_dir)
    predicted = sum(record["breakdown"][name] for name in CATEGORIES)
    assert predicted == pytest.approx(record["measured"]["peak_bytes"], rel=0.05)
    assert record["measured"]["step_s"] > 0
    assert "tensor memory: predicted " in done.stdout
    assert "plan.peak_tflops=" in done.stdout


# Refusals.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["plan.device=ascend910b4"], ["plan.device=ascend910b4 is not a known device; did you mean ascend910b"]),
        (["plan.device=ascend310p"], ["plan.device=ascend310p: it is an inference card and cannot train"]),
        (
            ["plan.device=ascend910a", "precision=bf16"],
            ["precision=bf16 but Ascend 910A has no bf16 arithmetic; use precision=fp16 or fp32"],
        ),
        (
            ["plan.device=a100", "parallel=fsdp_sp", "plan.world_size=3"],
            ["parallel.sp_size=3 does not divide the model's 4 attention heads"],
        ),
        (
            ["plan.device=a100", "parallel=fsdp_sp", "parallel.sp_size=4", "plan.world_size=6"],
            ["parallel.sp_size=4 does not divide the 6 ranks; choose one of 1, 2, 3, 6"],
        ),
        (
            ["plan.device=a100", "parallel=hsdp", "plan.world_size=3"],
            ["parallel.dp_replicate_size=2", "is not the 3 ranks"],
        ),
        (
            ["plan.device=a100", "parallel=fsdp", "plan.world_size=7"],
            ["train.global_batch_size=2 is not a multiple of", "7 data ranks"],
        ),
        (["plan.device=a100", "parallel=single", "plan.world_size=8"], ["parallel=single runs one rank"]),
        (["plan.device=a100", "plan.world_size=0"], ["plan.world_size=0", "must be positive"]),
        (
            ["plan.device=a100", "data.max_length=65536", "parallel=fsdp"],
            ["data.max_length=65536 is more than the model's 32768 positions", "model.rope_scaling.type=yarn"],
        ),
        (["plan.device=a100", "plan.layouts=[ddp,fsdp3]"], ["fsdp3 is not a layout"]),
        (["plan.device=a100", "plan.layouts=fsdp"], ["plan.layouts=fsdp", "must be all or a list"]),
        (["plan.device=a100", "plan.layouts=all", "plan.fit=true"], ["cannot be combined", "one question at a time"]),
        (["plan.device=a100", "plan.max_length=longest"], ["plan.max_length=longest"]),
        (["plan.device=a100", "plan.overlap=2"], ["plan.overlap=2", "must be in [0, 1]"]),
        (["plan.devise=a100"], ["plan.devise", "did you mean plan.device"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) and "=" in x[0] else "",
)
def test_wrong_words(wrong: list[str], said: list[str], plan: Plan, here: Path) -> None:
    text = refused(plan, here, *TINY, *wrong)
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "config.json"),
        ("{not json", "cannot be read"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json"),
    ],
    ids=["missing", "no JSON", "unknown model", "no number"],
)
def test_a_model_config_that_cannot_be_read(
    text: str | None, said: str, plan: Plan, here: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
    words = ["recipe=llama7b_32k", "parallel=fsdp", "plan.device=h100", f"model.path={folder}"]
    error = refused(plan, here, *words)
    assert said in error
    assert str(folder) in error


def test_a_model_folder_that_is_not_there(plan: Plan, here: Path) -> None:
    error = refused(plan, here, "recipe=llama7b_32k", "plan.device=h100", "model.path=/no/such/model")
    assert "model.path=/no/such/model is not a folder" in error


def test_a_plan_is_not_written_over(plan: Plan, here: Path) -> None:
    words = [*TINY, "parallel=single", "plan.device=a100", "run_dir=run"]
    assert plan(*words)[0] == EXIT_OK
    before = (here / "run" / "plan.json").read_bytes()
    code, _, error = plan(*words)
    assert code == EXIT_USER
    assert "run_dir=run holds a plan; choose another" in error
    assert (here / "run" / "plan.json").read_bytes() == before


@pytest.mark.parametrize("question", ["plan.world_size=8", "plan.fit=true", "plan.layouts=all", "plan.calibrate=true"])
def test_training_is_not_asked_a_question(question: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "parallel=single", question]) == EXIT_USER
    error = capsys.readouterr().err
    assert f"{question} is a question to plan" in error
    assert "python -m lctrain plan ..." in error
    assert not list(here.iterdir())
