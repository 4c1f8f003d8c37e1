"""Export, evaluate and sweeps on runs that exist."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lctrain import cli
from tests.support.command import column, lctrain, summary
from tests.support.ranks import pool

Straight = Callable[[str], Path]


@pytest.fixture(scope="module")
def exported(straight: Straight, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fsdp_sp run as a Hugging Face folder."""
    out = tmp_path_factory.mktemp("exported") / "model"
    assert cli.main(["export", f"run_dir={straight('fsdp_sp')}", f"out={out}"]) == 0
    return out


def _trained_logits(ranks: Any, run_dir: str, ids: list[list[int]]) -> Any:
    """Logits of the run's last checkpoint, in our own model."""
    import torch

    from lctrain.config.plain import load, to_plain
    from lctrain.ops.attention.documents import Documents
    from lctrain.train.checkpoint import find
    from tests.support.run import build

    config = load(Path(run_dir) / "config.yaml")
    plain = to_plain(config) | {"parallel": {"kind": "single"}, "launch": to_plain(config.launch)}
    plain["launch"]["nproc_per_node"] = None
    _, language = build(ranks, plain)
    folder = find("auto", Path(run_dir), print)
    language.engine.load(folder, optimizer=False)
    inputs = torch.tensor(ids)
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    with torch.no_grad():
        return language.model.logits(inputs, positions, Documents.from_lengths([inputs.shape[1]] * len(ids))).numpy()


def test_an_exported_model_gives_the_trained_models_logits(exported: Path, straight: Straight) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    texts = ["a nation restates", "in torrents it is"]
    ids = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in ids] == texts
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    ours = pool(1).run(_trained_logits, run_dir=str(straight("fsdp_sp")), ids=ids)[0]
    np.testing.assert_allclose(theirs, ours, atol=1e-6 * np.abs(ours).max(), rtol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.name for p in exported.parent.iterdir()} == {"model"}  # nothing is left aside


def test_evaluate_agrees_on_the_run_and_on_its_export(
    exported: Path, straight: Straight, words: list[str], tmp_path: Path
) -> None:
    run = straight("fsdp_sp")
    done = lctrain("evaluate", f"run_dir={run}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"run dir: {run}"
    told = json.loads((run / "evaluate-step-10.json").read_text())
    assert told["metrics"] == pytest.approx(summary(run)["metrics"], rel=1e-9)  # as at the end of training
    assert (told["verb"], told["layout"], told["world_size"]) == ("evaluate", "fsdp_sp", 2)
    assert summary(run)["verb"] == "train"  # the run's own is left alone

    out = tmp_path / "evaluated"
    pretrained = ["model.init=pretrained", f"model.path={exported}", "data.tokenizer=null", "parallel=single"]
    done = lctrain("evaluate", *words, *pretrained, f"run_dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(out)["metrics"] == pytest.approx(told["metrics"], rel=1e-5)
    assert summary(out)["model"] == str(exported)


def test_a_sweep_runs_every_job_in_a_directory_of_its_own(words: list[str], tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    short = ["parallel=single", "train.max_steps=2", "data.held_out=0", "checkpoint.save_at_end=false"]
    done = lctrain("-m", *words, *short, "optim.lr=1e-3,3e-2", f"run_dir={root}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [root / "0", root / "1"]
    assert [summary(run)["status"] for run in runs] == ["completed"] * 2
    assert [column(run, "lr")[-1] for run in runs] == [1e-3, 3e-2]
    assert column(runs[0], "loss")[0] == column(runs[1], "loss")[0]
    assert summary(runs[0])["last_loss"] != summary(runs[1])["last_loss"]
    assert f"sweep dir: {root}" in done.stdout
    assert {p.name for p in root.iterdir()} <= {"0", "1", "multirun.yaml"}
    assert not (tmp_path / "outputs").exists()
    assert not (tmp_path / "multirun").exists()


def test_a_sweep_returns_the_last_loss_to_its_sweeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an optimizing sweeper minimises; the jobs themselves are played."""
    from lctrain.train.run_dir import RunDir
    from lctrain.verbs import sweep, train

    returned: list[float] = []
    job = sweep._job

    def play(verb: str, config: Any, ranks: Any) -> int:
        run = RunDir(Path(config.run_dir))
        run.path.mkdir(parents=True, exist_ok=True)
        run.write_summary({"status": "completed", "last_loss": math.nan if config.seed == 2 else config.optim.lr})
        return 0

    def watched(command: Any, raw: Any) -> float:
        returned.append(job(command, raw))
        return returned[-1]

    monkeypatch.setattr(train, "run_config", play)
    monkeypatch.setattr(sweep, "_job", watched)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", "recipe=llama_tiny_32k", "optim.lr=0.01,0.02", "seed=1,2"]) == 0
    assert returned == pytest.approx([0.01, math.nan, 0.02, math.nan], nan_ok=True)
    assert len(list(tmp_path.glob("outputs/llama_tiny_32k/sweep-*/*/summary.json"))) == 4


def test_a_job_that_does_not_complete_ends_the_sweep_with_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lctrain.verbs import train

    ran: list[float] = []

    def stopped(verb: str, config: Any, ranks: Any) -> int:
        """Ctrl-C, say: the jobs after it must not start."""
        ran.append(config.optim.lr)
        return 75

    monkeypatch.setattr(train, "run_config", stopped)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", "recipe=llama_tiny_32k", "optim.lr=0.01,0.02"]) == 75
    assert ran == [0.01]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"error: the job in {tmp_path}/outputs/llama_tiny_32k/sweep-")
    assert said[0].endswith("/0 ended with exit code 75; the sweep stops here")


def test_selftest_writes_one_report(tmp_path: Path) -> None:
    done = lctrain("selftest", "device=cpu", "launch.nproc_per_node=1", "run_dir=proof", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comparisons hold." in done.stdout
    report = (tmp_path / "proof" / "selftest.md").read_text(encoding="utf-8")
    for section in ("attention kernels", "collectives", "parity", "plan and speed", "doctor"):
        assert f"\n## {section}\n" in report
    assert "| peak of tensor memory | ok |" in report
    assert "| single, fp32: gradients | ok |" in report


def test_a_run_that_a_platform_started_is_evaluated_anywhere(straight: Straight, tmp_path: Path) -> None:
    """The saved launch=slurm with its nodes is where the run was, not where it is read."""
    run = tmp_path / "run"
    shutil.copytree(straight("fsdp_sp"), run)
    saved = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    saved["launch"] |= {"kind": "slurm", "nnodes": 2}
    (run / "config.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    done = lctrain("evaluate", f"run_dir={run}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eval" in done.stdout
