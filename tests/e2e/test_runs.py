"""Whole runs: every layout the same losses; a kill, a signal, a dead rank; continued as if nothing had been."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lctrain.engines.sharded_state import TensorReader
from tests.e2e.conftest import STEPS
from tests.support.command import Running, column, records, summary

Straight = Callable[[str], Path]


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp"])
def test_every_layout_gives_the_losses_of_fsdp_sp(layout: str, straight: Straight) -> None:
    ours, theirs = straight(layout), straight("fsdp_sp")
    assert column(ours, "loss") == pytest.approx(column(theirs, "loss"), rel=1e-4)
    assert column(ours, "grad_norm") == pytest.approx(column(theirs, "grad_norm"), rel=1e-3)
    assert column(ours, "tokens") == column(theirs, "tokens")
    assert summary(ours)["metrics"] == pytest.approx(summary(theirs)["metrics"], rel=1e-4)


def test_a_run_leaves_what_it_should(straight: Straight) -> None:
    run = straight("fsdp_sp")
    assert {p.name for p in run.iterdir()} == {"config.yaml", "metrics.jsonl", "summary.json", "log.txt", "checkpoints"}
    rows = records(run)
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [r["lr"] for r in rows] == pytest.approx([1.5e-3] + [3e-3] * (STEPS - 1))
    told = summary(run)
    assert (told["status"], told["verb"], told["layout"], told["world_size"]) == ("completed", "train", "fsdp_sp", 2)
    assert (told["steps"], told["first_loss"], told["last_loss"]) == (STEPS, rows[0]["loss"], rows[-1]["loss"])
    assert {p.name for p in (run / "checkpoints").iterdir()} == {f"step-{n}" for n in range(2, STEPS + 1, 2)}
    said = (run / "log.txt").read_text()
    for line in (
        "parallel=fsdp_sp",
        "on 2 x cpu",
        "timeouts: collectives 1800 s",
        "attention: sdpa",
        f"step {STEPS}/{STEPS}",
    ):
        assert line in said


def tensors(run: Path, step: int) -> dict[tuple[object, ...], bytes]:
    """Every shard of a checkpoint as it was written, byte for byte; where in a file it lies means nothing."""
    folder = run / "checkpoints" / f"step-{step}"
    found = {}
    for index, place in TensorReader(folder).read_metadata().storage_data.items():
        with (folder / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            found[index.fqn, index.offset] = stream.read(place.length)
    return found


def test_kill_9_and_resume_equals_the_straight_run_bit_for_bit(
    words: list[str], straight: Straight, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    again = [*words, "parallel=fsdp_sp", "checkpoint.save_steps=2", "checkpoint.save_total_limit=9", f"run_dir={run}"]
    # What a run leaves that ended before its first checkpoint.
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 99.0}\n')
    first = Running(*again, "checkpoint.resume=auto", cwd=tmp_path)
    first.until(lambda: (run / "checkpoints" / "step-2").is_dir())
    ranks = first.ranks()
    first.process.kill()
    assert first.end() == -signal.SIGKILL
    assert sorted(ranks) == [0, 1]
    _, alive = psutil.wait_procs(ranks.values(), timeout=10)
    assert alive == []  # the launcher could not end them, so they ended themselves
    assert not (run / "summary.json").exists()
    assert len(records(run)) < STEPS
    # What a kill in the middle of writing leaves.
    (run / "checkpoints" / f".step-{STEPS}.partial").mkdir()
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')

    second = Running(*again, "checkpoint.resume=auto", cwd=tmp_path, name="second")
    assert second.end() == 0, second.err
    assert f".step-{STEPS}.partial is ignored: it was interrupted" in second.out
    assert "continued from" in second.out
    whole = straight("fsdp_sp")
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "epoch"):
        assert column(run, name) == column(whole, name), name
    assert summary(run)["metrics"] == summary(whole)["metrics"]
    assert tensors(run, STEPS) == tensors(whole, STEPS)
    assert any(name.endswith("exp_avg_sq") for name, _ in tensors(whole, STEPS))
    assert tensors(whole, STEPS) != tensors(whole, STEPS - 2)


def test_sigterm_saves_and_another_layout_continues(words: list[str], straight: Straight, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Running(*words, "parallel=fsdp_sp", "checkpoint.save_at_end=false", f"run_dir={run}", cwd=tmp_path)
    first.until(lambda: len(records(run)) >= 1)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75, first.err
    assert first.out.splitlines()[-1] == f"run dir: {run}"
    told = summary(run)
    stopped = told["steps"]
    assert told["status"] == "preempted"
    assert 1 <= stopped < STEPS
    assert {p.name for p in (run / "checkpoints").iterdir()} == {f"step-{stopped}"}
    assert column(run, "loss") == column(straight("fsdp_sp"), "loss")[:stopped]

    second = Running(*words, "parallel=single", "checkpoint.resume=auto", f"run_dir={run}", cwd=tmp_path, name="second")
    assert second.end() == 0, second.err
    assert column(run, "step") == list(range(1, STEPS + 1))
    assert column(run, "loss") == pytest.approx(column(straight("fsdp_sp"), "loss"), rel=1e-4)
    told = summary(run)
    assert (told["status"], told["layout"], told["world_size"], told["steps"]) == ("completed", "single", 1, STEPS)


def test_a_rank_that_dies_ends_the_job_at_once_and_is_named_once(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Running(*words, "parallel=fsdp_sp", "train.max_steps=100000", f"run_dir={run}", cwd=tmp_path)
    job.until(lambda: len(records(run)) >= 1)
    ranks = job.ranks()
    ranks[1].kill()
    assert job.end(10) == 1
    assert job.err.count("rank 1 was ended by SIGKILL") == 1
    assert "Traceback" not in job.err  # a lost connection is not the cause
    assert len(job.err.splitlines()) <= 2
    _, alive = psutil.wait_procs(ranks.values(), timeout=5)
    assert alive == []


def test_ctrl_c_twice_leaves_at_once(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = ["data.max_length=16384", "train.max_steps=1000", "train.global_batch_size=64"]  # a step of a minute
    job = Running(*words, *long, "eval.max_sequences=1", "parallel=fsdp_sp", f"run_dir={run}", cwd=tmp_path)
    job.until(lambda: "norms and biases" in job.out)
    ranks = job.ranks()
    job.process.send_signal(signal.SIGINT)
    job.until(lambda: "Ctrl-C again leaves at once" in job.err)
    job.process.send_signal(signal.SIGINT)
    assert job.end(10) == 130
    _, alive = psutil.wait_procs(ranks.values(), timeout=5)
    assert alive == []
    assert column(run, "step") == []


def test_two_nodes_train_as_one_and_stop_together(words: list[str], straight: Straight, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    run = tmp_path / "run"
    shared = [
        "parallel=fsdp_sp",
        "launch.nnodes=2",
        "launch.nproc_per_node=1",
        f"launch.rdzv_endpoint=127.0.0.1:{port}",
    ]
    nodes = [
        Running(*words, *shared, f"launch.node_rank={n}", f"run_dir={run}", cwd=tmp_path, name=f"node{n}")
        for n in (0, 1)
    ]
    nodes[0].until(lambda: len(records(run)) >= 1)
    nodes[0].process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [75, 75], nodes[0].err + nodes[1].err
    told = summary(run)
    assert (told["status"], told["world_size"]) == ("preempted", 2)
    assert column(run, "loss") == pytest.approx(column(straight("fsdp_sp"), "loss")[: told["steps"]], rel=1e-6)
    assert (run / "checkpoints" / f"step-{told['steps']}").is_dir()
    assert "Traceback" not in nodes[0].err + nodes[1].err


def test_a_finished_run_is_continued_by_a_new_one(words: list[str], straight: Straight, tmp_path: Path) -> None:
    # Longer, from the middle of a finished run, and the finished run stays as it was.
    source = tmp_path / "source"
    shutil.copytree(straight("single"), source)
    run = tmp_path / "run"
    resume = f"checkpoint.resume={source}/checkpoints/step-{STEPS - 2}"
    job = Running(*words, "parallel=single", resume, f"run_dir={run}", cwd=tmp_path)
    assert job.end() == 0, job.err
    assert column(run, "step") == [STEPS - 1, STEPS]
    assert column(run, "loss") == column(source, "loss")[-2:]
    assert len(records(source)) == STEPS
