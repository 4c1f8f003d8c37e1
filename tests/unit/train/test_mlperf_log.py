"""mlperf.log as the official checker sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lctrain.config.compose import compose_config
from lctrain.train.callbacks.mlperf import Job, MlperfLog
from lctrain.train.checkpoint import TrainState

STEPS, PER_EPOCH = 20, 10
LARS = (
    "optim=lars",
    "optim.base_lr_per=null",
    "optim.lr=10.0",
    "optim.weight_decay=2e-4",
    "schedule=polynomial",
    "schedule.warmup_epochs=0.5",
    "schedule.end_lr=1e-4",
)


def log_of(
    folder: Path, *overrides: str, start: int = 0, evaluations: tuple[int, ...] = (10, 20), status: str = "completed"
) -> Path:
    """The log of a run from `start` to STEPS with accuracies of .5 and more."""
    config = compose_config(
        ["recipe=resnet8_fashion_mnist", "train.global_batch_size=10", "train.micro_batch_size=5", *overrides]
    )
    path = folder / "mlperf.log"
    # The checker allows four hours of preparation.
    job = Job(began=time.time() - 60, train_samples=100, eval_samples=20, accumulation=2, platform="2 x cpu")
    log = MlperfLog(path, config, job)
    log.start(TrainState(step=start), STEPS)
    for step in (s for s in evaluations if s > start):
        log.evaluated(step, {"top1": 0.5 + step / 100})
    log.close(status)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Entries of a log."""
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def accepts(path: Path) -> bool:
    """What mlperf-logging says."""
    done = subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0",
         "--log_output", str(path.with_name("out.txt")), str(path)],
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert b"Traceback" not in done.stderr
    return done.returncode == 0


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ((), {}),
        (LARS, {}),
        (("eval.every_epochs=0", "eval.every_steps=5"), {"evaluations": (5, 10, 15, 20)}),
        (("eval.every_epochs=0",), {"evaluations": (20,)}),
        ((*LARS, "eval.every_epochs=0.7"), {"start": 9, "evaluations": (14, 20)}),
    ],
    ids=["sgd", "lars", "every steps", "at the end", "continued"],
)
def test_the_checker_accepts(overrides: tuple[str, ...], more: dict[str, Any], tmp_path: Path) -> None:
    assert accepts(log_of(tmp_path, *overrides, **more))


@pytest.mark.parametrize("broken", ["run_stop", "eval_accuracy", "reversed"])
def test_the_checker_rejects_a_broken_log(broken: str, tmp_path: Path) -> None:
    path = log_of(tmp_path)
    text = path.read_text().splitlines()
    kept = [line for line in text if f'"key": "{broken}"' not in line]
    text = text[::-1] if broken == "reversed" else kept
    path.write_text("".join(f"{line}\n" for line in text))
    assert not accepts(path)


def test_the_closed_divisions_keys_of_lars(tmp_path: Path) -> None:
    found = {entry["key"]: entry["value"] for entry in lines(log_of(tmp_path, *LARS))}
    lars = {key: value for key, value in found.items() if key.startswith(("lars_", "opt_"))}
    assert lars == {
        "opt_name": "lars",
        "lars_opt_base_learning_rate": 10.0,
        "lars_opt_end_learning_rate": 1e-4,
        "lars_opt_learning_rate_decay_poly_power": 2.0,
        "lars_opt_learning_rate_decay_steps": 15,
        "lars_opt_learning_rate_warmup_epochs": 0.5,
        "lars_opt_momentum": 0.9,
        "lars_opt_weight_decay": 2e-4,
        "lars_epsilon": 0.0,
    }
    assert (found["global_batch_size"], found["gradient_accumulation_steps"]) == (10, 2)
    assert (found["train_samples"], found["eval_samples"]) == (100, 20)


@pytest.mark.parametrize(
    ("given", "eps"),
    [
        ("optim.form=momentum_corrected", 0.0),
        ("optim.form=lr_outside", 1e-8),
        ("optim.form=fujitsu", 1e-9),
        ("optim.eps=1e-5", 1e-5),
    ],
)
def test_epsilon_is_the_forms_own(given: str, eps: float, tmp_path: Path) -> None:
    path = log_of(tmp_path, "optim=lars", given)
    assert [entry["value"] for entry in lines(path) if entry["key"] == "lars_epsilon"] == [eps]


def test_blocks_and_epochs(tmp_path: Path) -> None:
    found = lines(log_of(tmp_path, "eval.every_epochs=0.7", start=3, evaluations=(7, 14, 20), status="preempted"))
    started = [e["metadata"] for e in found if e["key"] == "block_start"]
    assert [(e["first_epoch_num"], e["epoch_count"]) for e in started] == [(1.3, 0.7), (1.7, 0.7), (2.4, 0.6)]
    assert len([e for e in found if e["key"] == "block_stop"]) == 3
    where = [(e["metadata"]["epoch_num"], round(e["value"], 6)) for e in found if e["key"] == "eval_accuracy"]
    assert where == [(0.7, 0.57), (1.4, 0.64), (2.0, 0.7)]
    stopped = [e["key"] for e in lines(log_of(tmp_path, "eval.every_epochs=0.7", evaluations=(7,), status="preempted"))]
    assert stopped.count("block_start") == stopped.count("block_stop") == 2
    assert found[-1]["key"] == "run_stop"
    assert found[-1]["metadata"]["status"] == "aborted"
    # A continued run writes a new log, and keeps the old ones.
    before = (tmp_path / "mlperf.log").read_text()
    assert [e["key"] for e in lines(log_of(tmp_path))].count("run_start") == 1
    kept = sorted(p.name for p in tmp_path.glob("mlperf-*.log"))
    assert (tmp_path / kept[-1]).read_text() == before
