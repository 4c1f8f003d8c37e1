"""The run directory: never written over, metrics once a step, summaries that any JSON reader takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lctrain.errors import ConfigError
from lctrain.train.callbacks.base import Callback, StepRecord, close_all
from lctrain.train.callbacks.metrics_file import MetricsFile
from lctrain.train.log import Log
from lctrain.train.run_dir import RunDir, check_free, default_run_dir, make_run_dir, read_summary


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def strict(text: str) -> dict:
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def record(step: int, loss: float = 1.0, norm: float = 2.0) -> StepRecord:
    """A record of a step."""
    return StepRecord(step, step / 3, loss, loss, norm, 0.1, "tokens", 64.0 * step, 0.5, 128.0, None, 7, 0.0, False)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run_dir=.*file cannot be made \(.*\); give a folder in which you may"):
        make_run_dir(tmp_path / "file")


class Broken(Callback):
    """Cannot close."""

    def close(self, status: str) -> None:
        """Fail."""
        raise OSError(28, "No space left on device")


class Closed(Callback):
    """Remembers how it was closed."""

    said: str | None = None

    def close(self, status: str) -> None:
        """Remember."""
        self.said = status


def test_a_callback_that_cannot_close_spoils_nothing_but_itself() -> None:
    last, said = Closed(), []
    close_all([Broken(), last], "completed", said.append)
    assert last.said == "completed"
    assert said == ["warning: Broken did not end well: OSError: [Errno 28] No space left on device"]


def test_free_unfinished_and_finished(run: RunDir) -> None:
    for resume in (None, "auto"):
        check_free(run.path, resume)
        check_free(run.path / "nowhere", resume)
    (run.path / "config.yaml").write_text("")
    check_free(run.path, "auto")
    for resume in (None, "/some/path"):
        with pytest.raises(ConfigError, match=r"holds an unfinished run; add checkpoint\.resume=auto"):
            check_free(run.path, resume)
    run.write_summary({"status": "preempted"})
    check_free(run.path, "auto")
    run.write_summary({"status": "completed"})
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match="holds a finished run; choose another run_dir"):
            check_free(run.path, resume)


def test_metrics_after_a_step_are_dropped_and_so_is_a_line_that_was_cut(run: RunDir) -> None:
    run.drop_metrics_after(3)  # nothing there yet
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3, 4)]
    run.metrics.write_text("\n".join([*lines, '{"step": 1, "lo']))
    run.drop_metrics_after(2)
    assert run.metrics.read_text() == "".join(f"{line}\n" for line in lines[:2])
    run.metrics.write_text(lines[0] + '\n{"loss": 1}\nnull\n' + lines[1] + "\n")
    run.drop_metrics_after(9)
    assert run.metrics.read_text() == f"{lines[0]}\n{lines[1]}\n"


def test_evaluations_are_kept_with_their_step(run: RunDir) -> None:
    file = MetricsFile(run.metrics, every_steps=1)
    for step in (1, 2, 3):
        file.step_end(record(step))
        file.evaluated(step, {"eval_loss": 5.0 - step})
    file.close("completed")
    run.drop_metrics_after(2)
    kept = [strict(line) for line in run.metrics.read_text().splitlines()]
    assert [(r["step"], r.get("eval_loss")) for r in kept] == [(1, None), (1, 4.0), (2, None), (2, 3.0)]


def test_not_a_number_is_null_in_metrics(run: RunDir) -> None:
    file = MetricsFile(run.metrics, every_steps=1)
    file.step_end(record(1, loss=math.nan, norm=math.inf))
    # Flushed at once: a killed run keeps it.
    written = strict(run.metrics.read_text())
    assert (written["loss"], written["grad_norm"], written["lr"]) == (None, None, 0.1)
    file.evaluated(1, {"eval_loss": math.inf, "eval_perplexity": -math.inf})
    file.close("completed")
    assert strict(run.metrics.read_text().splitlines()[1]) == {"step": 1, "eval_loss": None, "eval_perplexity": None}


def test_records_have_the_fields_people_read(run: RunDir) -> None:
    file = MetricsFile(run.metrics, every_steps=2)
    for step in (1, 2, 3, 4):
        file.step_end(record(step))
    file.close("completed")
    rows = [strict(line) for line in run.metrics.read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 4]
    assert set(rows[0]) == {
        "step", "epoch", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu",
        "peak_memory_bytes", "data_wait_s", "skipped",
    }  # fmt: skip
    assert (rows[1]["tokens"], rows[1]["mfu"]) == (128, None)


def test_a_summary_is_json_even_when_training_failed(run: RunDir) -> None:
    assert read_summary(run.path) == {}
    run.write_summary({"status": "failed", "last_loss": math.nan, "metrics": {"eval_perplexity": math.inf}})
    assert strict(run.summary.read_text()) == {
        "status": "failed",
        "last_loss": None,
        "metrics": {"eval_perplexity": None},
    }
    assert read_summary(run.path)["status"] == "failed"
    assert {p.name for p in run.path.iterdir()} == {"summary.json"}


def test_creating_again_forgets_the_old_summary(run: RunDir) -> None:
    from tests.support.tiny import tiny_config

    run.write_summary({"status": "preempted"})
    run.create(tiny_config())
    assert {p.name for p in run.path.iterdir()} == {"config.yaml"}


def test_two_runs_of_one_second_get_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = set()
    for _ in range(3):
        path = default_run_dir("mine")
        path.mkdir(parents=True)
        seen.add(path)
    assert len(seen) == 3
    assert all(path.parts[:2] == ("outputs", "mine") for path in seen)
    assert default_run_dir(None).parts[1] == "run"


def test_the_log_keeps_what_was_said_before_it_had_a_file(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(speaks=True)
    log("first")
    log.attach(run.log)
    log("second")
    assert run.log.read_text() == "first\nsecond\n"
    assert capsys.readouterr().out == "first\nsecond\n"


def test_other_ranks_are_silent(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(speaks=False)
    log("first")
    log.attach(run.log)
    log("second")
    assert not run.log.exists()
    assert capsys.readouterr().out == ""
