"""One rank's exit code, and who says why: the first rank that fails, once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from lctrain import worker
from lctrain.config.root import Device
from lctrain.errors import DataError, DeviceError, TrainingStopped
from lctrain.runtime.process import Ranks
from lctrain.train.gate import PeerFailed, first_on_node
from tests.support.tiny import tiny_config

GLOO = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """One store for all ranks that `work` plays, and this process's signal handlers back afterwards."""
    shared = dist.HashStore()
    monkeypatch.setattr(worker, "connect", lambda ranks, timeout_s: shared)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield shared
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def play(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job whose rank_main is given, as a rank of two; its exit code."""

    def run(rank_main: Any, rank: int = 0) -> int:
        monkeypatch.setitem(sys.modules, "played_job", SimpleNamespace(rank_main=rank_main))
        monkeypatch.setitem(worker._JOBS, "play", "played_job")
        ranks = Ranks(rank=rank, world_size=2, local_rank=rank, local_world_size=2, launcher="lctrain")
        config = tiny_config("parallel=fsdp")
        return worker.work("play", config, ranks)

    return run


def failing(error: Exception) -> Any:
    """A rank_main that raises."""

    def rank_main(session: Any) -> int:
        raise error

    return rank_main


def test_the_jobs_code_is_the_ranks(play: Any) -> None:
    assert [play(lambda session, code=code: code) for code in (0, 3, 75)] == [0, 3, 75]


def test_a_users_error_is_one_line_and_said_by_one_rank(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    error = failing(DataError("data.path=x does not exist; give a file"))
    assert [play(error, rank) for rank in (0, 1)] == [2, 76]
    assert capsys.readouterr().err == "error: data.path=x does not exist; give a file\n"


def test_a_bug_is_a_traceback_said_by_the_first_rank_that_fails(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(failing(ZeroDivisionError("first")), rank=1) == 1
    assert play(failing(KeyError("second")), rank=0) == 76
    said = capsys.readouterr().err
    assert said.startswith("rank 1 failed:\nTraceback")
    assert said.count("Traceback") == 1
    assert "second" not in said


def test_training_that_cannot_go_on_is_not_the_users_input(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(failing(TrainingStopped("20 steps in a row"))) == 1
    assert "20 steps in a row" in capsys.readouterr().err


def test_a_rank_that_only_waited_says_nothing(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(failing(PeerFailed())) == 76
    assert capsys.readouterr().err == ""


def test_a_lost_connection_is_an_echo(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(failing(RuntimeError(GLOO))) == 76
    assert capsys.readouterr().err == "rank 0 lost its connection to another rank, which has ended\n"


def test_other_communication_failures_keep_their_traceback(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(failing(RuntimeError("[gloo/transport] Timed out waiting 1800000ms for recv operation"))) == 1
    assert "Timed out" in capsys.readouterr().err


def test_the_session_gets_the_config_and_a_stop_flag_that_hears_signals(play: Any) -> None:
    def rank_main(session: Any) -> int:
        assert session.config.parallel.kind == "fsdp"
        assert not session.stop.requested
        signal.raise_signal(signal.SIGTERM)
        return 75 if session.stop.requested else 1

    assert play(rank_main) == 75


class Left(BaseException):
    """The process has ended."""


def test_a_signal_before_the_first_step_ends_the_rank_there(
    play: Any, store: dist.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> NoReturn:
        raise Left(code)

    def while_preparing(session: Any) -> int:
        with session.stop.at_once(session.leave_early):
            signal.raise_signal(signal.SIGTERM)
        return 1

    def just_before(session: Any) -> int:
        signal.raise_signal(signal.SIGTERM)
        with session.stop.at_once(session.leave_early):
            return 1

    monkeypatch.setattr(os, "_exit", leave)
    for rank_main in (while_preparing, just_before):
        with pytest.raises(Left, match="75"):
            play(rank_main)
    assert capsys.readouterr().err == "stopped before the first step; the same command starts it again\n"
    with pytest.raises(PeerFailed):
        first_on_node(Ranks(1, 2, 1, 2, "lctrain"), store, "prepared", pytest.fail, pytest.fail, 1)


def test_memory_that_ran_out_is_the_users_to_mend_and_has_no_traceback(
    play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")
    assert play(failing(error), rank=1) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rank 1 ran out of host memory: 20.00 GiB could not be had")
    assert "parallel=fsdp_sp" in said
    assert "Traceback" not in said
    assert play(failing(error)) == 76


def test_a_torch_that_cannot_be_imported_is_said_once_on_each_machine(
    play: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: Device) -> None:
        raise DeviceError("source set_env.sh")

    monkeypatch.setattr(worker, "import_torch", refuse)
    assert [play(lambda session: 0, rank=rank) for rank in (1, 0)] == [76, 2]
    assert capsys.readouterr().err == "error: source set_env.sh\n"
