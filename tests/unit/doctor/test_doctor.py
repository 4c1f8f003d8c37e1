"""The verb: what it takes, what it looks at, and that no torch can take it down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lctrain import cli
from lctrain.config.root import Device
from lctrain.doctor import facts, probe
from lctrain.doctor.facts import gather, kind_of, usable_cores
from lctrain.doctor.probe import Card, Probe, read_probe, run_probe
from lctrain.runtime.ascend import Packages
from lctrain.verbs import doctor
from tests.unit.doctor.machines import CPU, NPU, with_probe

LINE = '{"stage": "done", "error": null, "device_type": "npu", "cards": [{"name": "x", "free": 1, "total": 2}]}'


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the probe run a script of ours in place of the interpreter."""

    def runs(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=gpu"], "device=gpu must be one of auto, npu, cuda, cpu"),
        (["device=npu", "seed=1"], "seed=1 has no effect on doctor, which takes device=auto, npu, cuda or cpu"),
        (["--print-config"], "doctor reads no configuration"),
        (["--config-dir", "x"], "doctor reads no configuration"),
        (["-m", "device=npu,cpu"], "-m sweeps training runs and plans"),
    ],
)
def test_words_that_mean_nothing(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Device] = []
    machine = NPU
    monkeypatch.setattr(doctor, "gather", lambda device: (asked.append(device), machine)[1])
    assert cli.main(["doctor"]) == 0
    machine = with_probe(NPU, bf16=False)
    assert cli.main(["doctor", "device=npu"]) == 0
    machine = with_probe(NPU, cards=())
    assert cli.main(["doctor", "device=cpu"]) == 3
    assert asked == [Device.auto, Device.npu, Device.cpu]
    assert capsys.readouterr().out.splitlines()[-1] == "doctor: 1 fault, 0 warnings"


def test_this_machine() -> None:
    found = gather(Device.cpu)
    assert found.kind == "cpu"
    assert found.probe == Probe(stage="done", device_type="cpu")
    assert found.cores >= 1
    assert 0 < found.host.free <= found.host.total
    assert found.packages.torch is not None


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -ABRT $$", "start ended the process with SIGABRT"),
        ('echo \'{"stage": "importing torch", "cards": []}\'; echo no >&2; kill -ABRT $$', "with SIGABRT (no)"),
        ("exit 7", "start ended the process with exit code 7"),
    ],
)
def test_an_import_that_ends_the_process(script: str, error: str, python: Any) -> None:
    python(script)
    found = run_probe(Device.auto)
    assert found.error is not None
    assert error in found.error
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.mend


def test_an_import_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("python", 120, output=b'{"stage": "asking the devices", "cards": []}\n')

    monkeypatch.setattr(subprocess, "run", late)
    found = run_probe(Device.auto)
    assert found.error == "asking the devices took more than 120 s"
    assert found.mend


def test_the_last_answer_counts(python: Any) -> None:
    text = f'{{"stage": "start", "cards": []}}\na library speaks\n{LINE}\nand again'
    assert read_probe(text) == Probe(stage="done", device_type="npu", cards=(Card("x", 1, 2),))
    assert read_probe("nothing") == Probe()
    python(f"echo '{LINE}'")
    assert run_probe(Device.auto).cards == (Card("x", 1, 2),)


def test_the_probe_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["probe", "npu"])
    monkeypatch.setattr(probe, "read_packages", lambda: Packages("2.13.0"))
    probe.main()
    found = read_probe(capsys.readouterr().out)
    assert found.stage == "asking for devices"
    assert found.error == "device=npu but torch_npu cannot be imported (it is not installed)"
    assert found.mend.startswith("pip install torch_npu==")


@pytest.mark.parametrize(
    ("error", "text", "mend"),
    [
        (
            RuntimeError("EJ0001: \n Failed to initialize"),
            "EJ0001: a process still holds the card, as after a run that was killed",
            "wait ten seconds",
        ),
        (RuntimeError("driver\n error"), "driver error", "npu-smi info or nvidia-smi"),
        (ModuleNotFoundError("No module named 'torch'"), "No module named 'torch'", "install torch again"),
    ],
)
def test_the_probe_gives_the_mend_of_what_it_met(
    error: Exception, text: str, mend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: Device) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["probe", "auto"])
    monkeypatch.setattr(probe, "import_torch", fail)
    probe.main()
    found = read_probe(capsys.readouterr().out)
    assert (found.stage, found.error) == ("importing torch", text)
    assert mend in found.mend


def test_the_device_that_is_meant(tmp_path: Path) -> None:
    torch_npu = Packages("2.13.0", "2.13.0", "2.13.0")
    assert kind_of(Device.cuda, torch_npu, NPU.probe, tmp_path) == "cuda"
    assert kind_of(Device.auto, Packages(), NPU.probe, tmp_path) == "npu"
    assert kind_of(Device.auto, torch_npu, Probe(error="x"), tmp_path) == "npu"
    assert kind_of(Device.auto, Packages(), CPU.probe, tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert kind_of(Device.auto, Packages(), CPU.probe, tmp_path) == "cuda"
    (tmp_path / "davinci3").touch()
    assert kind_of(Device.auto, Packages(), CPU.probe, tmp_path) == "npu"


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.os, "sched_getaffinity", lambda process: set(range(8)))
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == 8
    for text, cores in (("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)):
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_tools_that_are_absent_fail_or_answer(tmp_path: Path) -> None:
    assert facts._ask((str(tmp_path / "npu-smi"),)) is None
    assert facts._ask((sys.executable, "-c", "import sys; print('x'); sys.exit(1)")) is None
    assert facts._ask((sys.executable, "-c", "print('x')")) == "x\n"


def test_only_the_probe_imports_torch() -> None:
    """So that a doctor on a machine without torch, or with one that aborts, still answers."""
    script = "import sys, lctrain.cli, lctrain.verbs.doctor; print(sorted({'torch', 'torch_npu'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
