"""Every kind of wrong input: exit 2, one message with the value and the mend, nothing written, nothing lost.

What fails before ranks start goes through cli.main; what the first rank finds goes through worker.work
in this process, which is all that rank does before it meets others; some of each go through real ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lctrain import cli
from lctrain.config.compose import compose_config
from lctrain.errors import EXIT_USER, DeviceError
from lctrain.runtime import device as devices
from lctrain.runtime.process import Ranks
from lctrain.train.session import Session
from lctrain.train.stop import StopFlag
from lctrain.worker import work
from tests.support.command import environment, lctrain

Straight = Callable[[str], Path]
Refused = Callable[..., str]


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, where nothing may appear."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield folder
    for number, handler in before.items():
        signal.signal(number, handler)


def only_error(text: str) -> str:
    """The one error message of what was printed to stderr."""
    assert text.startswith("error: "), text
    assert text.count("error: ") == 1, text
    assert "Traceback" not in text
    return text.removeprefix("error: ")


@pytest.fixture
def refused(here: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> Refused:
    """What the command line says about wrong words before it starts any rank."""

    def run(*wrong: str, bare: bool = False) -> str:
        given = list(wrong) if bare else [*words, "parallel=single", *wrong]
        assert cli.main(given) == 2
        assert files(here) == {}
        return only_error(capsys.readouterr().err)

    return run


@pytest.fixture
def first_rank(here: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What the first rank says about wrong words."""

    def run(*wrong: str) -> str:
        config = compose_config([*words, "parallel=single", f"data.cache_dir={tmp_path / 'cache'}", *wrong])
        assert work("train", config, Ranks()) == 2
        assert files(here) == {}
        return only_error(capsys.readouterr().err)

    return run


# Before any rank starts.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("optim.lrr=1", ["optim.lrr", "did you mean optim.lr"]),
        ("gradient_accumulation_steps=4", ["gradient_accumulation_steps", "it is derived"]),
        ("optim.lr=fast", ["optim.lr=fast", "give a value of that type"]),
        ("data.held_out=1.5", ["data.held_out=1.5", "must be a fraction"]),
        ("train.global_batch_size=3 train.micro_batch_size=2", ["=3", "micro_batch_size=2", "set", "to 2 or 4"]),
        (
            "parallel=fsdp_sp launch.nproc_per_node=6 parallel.sp_size=4",
            ["parallel.sp_size=4 does not divide the 6 ranks", "choose one of 1, 2, 3, 6"],
        ),
        (
            "parallel=fsdp_sp launch.nproc_per_node=3",
            ["parallel.sp_size=3 does not divide the model's 4 attention heads", "choose parallel.sp_size from 1"],
        ),
        ("launch.nproc_per_node=2", ["launch.nproc_per_node=2", "parallel=single runs one", "choose parallel=ddp"]),
        ("data.path=null", ["data.path is not set", "e.g. data=text"]),
    ],
)
def test_fields(wrong: str, said: list[str], refused: Refused) -> None:
    text = refused(*wrong.split())
    assert all(part in text for part in said), text


def test_recipes(refused: Refused) -> None:
    text = refused("recipe=llama_tiny", bare=True)
    assert "recipe=llama_tiny does not exist; did you mean llama_tiny_32k" in text
    assert "recipe is not given; choose one: " in refused("optim.lr=1", bare=True)


def test_a_sweep_that_cannot_begin_leaves_nothing(refused: Refused, tmp_path: Path) -> None:
    assert "optim.lrr is not a field" in refused("-m", "recipe=llama_tiny_32k", "optim.lrr=1,2", bare=True)
    assert "recipe is not given" in refused("-m", "optim.lr=1,2", bare=True)
    assert "is not a multiple of" in refused("-m", "train.global_batch_size=3,6", "train.micro_batch_size=2")
    assert "does not parse" in refused("-m", "recipe=llama_tiny_32k", "optim.lr=[1", bare=True)
    refused("-m", "optim.lr=-1,1", f"run_dir={tmp_path}/sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("resume", [[], ["checkpoint.resume=auto"]])
def test_a_finished_run_is_never_written_over(resume: list[str], straight: Straight, refused: Refused) -> None:
    run = straight("single")
    before = files(run)
    text = refused(f"run_dir={run}", *resume)
    assert f"run_dir={run} holds a finished run; choose another run_dir" in text
    assert files(run) == before


def test_an_unfinished_run_is_not_written_over_by_accident(
    straight: Straight, refused: Refused, tmp_path: Path
) -> None:
    run = tmp_path / "unfinished"
    shutil.copytree(straight("single"), run)
    (run / "summary.json").unlink()
    before = files(run)
    assert "add checkpoint.resume=auto to continue it" in refused(f"run_dir={run}")
    assert files(run) == before


# What the first rank finds, before it writes anything or meets others.


def test_data_that_are_not_there(first_rank: Refused, tmp_path: Path) -> None:
    assert f"data.path={tmp_path}/nowhere does not exist" in first_rank(f"data.path={tmp_path}/nowhere")
    (tmp_path / "empty").mkdir()
    text = first_rank(f"data.path={tmp_path}/empty")
    assert f"data.path={tmp_path}/empty has no file" in text
    assert "data.extensions" in text


def test_a_document_with_no_tokens(first_rank: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("some words")
    (folder / "b.txt").write_text(" \n")
    text = first_rank(f"data.path={folder}", "data.held_out=0")
    assert f"{folder}/b.txt" in text
    assert "a document with no tokens" in text
    assert "data.on_bad_record=skip" in text
    assert not [name for name in files(tmp_path / "cache") if name.endswith(".arrow")]  # nothing half done


def test_a_line_that_does_not_parse(first_rank: Refused, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "cut\n{"text": "fine"}\n')
    text = first_rank("data=jsonl", f"data.path={path}", "data.held_out=0")
    assert f"{path}:2" in text
    assert "data.on_bad_record=skip" in text


def test_bad_records_can_be_skipped_and_are_counted(here: Path, words: list[str], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"text": "some words"}', "not json", '{"text": " "}']))
    given = ["parallel=single", "data=jsonl", f"data.path={path}", "data.on_bad_record=skip", "data.held_out=0"]
    config = compose_config([*words, *given, f"data.cache_dir={tmp_path / 'cache'}"])
    data = Session(config, Ranks(), dist.HashStore(), StopFlag()).prepare(("train",))["train"]
    assert data is not None
    assert (data.documents, data.skipped) == (1, 2)
    said = capsys.readouterr().out
    assert "skipped 2 bad records" in said
    assert "rows.jsonl:2" in said


def test_operators_of_another_device(first_rank: Refused) -> None:
    assert "model.npu_fused=true but the device is cpu, " in first_rank("model.npu_fused=true")


def test_a_tokenizer_that_does_not_fit(first_rank: Refused) -> None:
    text = first_rank("model.architecture.vocab_size=128")
    assert "128" in text
    assert "260" in text or "259" in text or "ocabulary" in text
    assert "; " in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pretrained model of two safetensors files with the byte tokenizer's vocabulary."""
    from tests.unit.models.tiny_models import export, random_model

    out = tmp_path / "model"
    export(random_model("llama", vocab_size=320, max_position_embeddings=256), out, shard_bytes=60_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    return out


def damage_missing(folder: Path) -> Path:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    return path


def damage_truncated(folder: Path) -> Path:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])
    return path


def damage_header(folder: Path) -> Path:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(struct.pack("<Q", 10**9) + path.read_bytes()[8:])
    return path


@pytest.mark.parametrize(
    ("damage", "said"),
    [(damage_missing, "is missing"), (damage_truncated, "is truncated"), (damage_header, "is truncated")],
)
def test_safetensors_that_are_not_whole(damage: Any, said: str, first_rank: Refused, folder: Path) -> None:
    path = damage(folder)
    before = files(folder)
    text = first_rank("model.init=pretrained", f"model.path={folder}")
    assert f"{path} {said}" in text
    assert "copy" in text
    assert files(folder) == before


def test_a_model_folder_without_a_config(first_rank: Refused, refused: Refused, folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json" in refused("model.init=pretrained", f"model.path={folder}")


def test_more_ranks_than_devices(here: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_load", lambda device_type: None)
    monkeypatch.setattr(devices, "count", lambda device_type: 2)
    config = compose_config([*words, "parallel=fsdp", "device=npu", "train.global_batch_size=3"])
    ranks = Ranks(rank=0, world_size=3, local_rank=0, local_world_size=3, launcher="lctrain")
    with pytest.raises(DeviceError) as caught:
        Session(config, ranks, dist.HashStore(), StopFlag())
    assert "3 ranks on this machine but 2 npu devices; set launch.nproc_per_node=2" in str(caught.value)
    assert caught.value.exit_code == EXIT_USER
    assert files(here) == {}


def test_a_device_that_is_not_there(first_rank: Refused) -> None:
    assert "device=npu but torch_npu cannot be imported" in first_rank("device=npu")


def test_7b_on_a_machine_without_the_memory(first_rank: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lctrain.train.session.host_memory_bytes", lambda: 64 * 2**30)
    text = first_rank("recipe=llama7b_32k", "model.init=random", "data.max_length=32768", "eval.every_steps=0")
    assert "6.74B parameters under parallel=single need 100.4 GiB" in text
    assert "has 64.0 GiB" in text
    assert "shard over more devices" in text


def test_a_checkpoint_of_another_model(first_rank: Refused, straight: Straight, tmp_path: Path) -> None:
    run = straight("single")
    before = files(run)
    text = first_rank(f"checkpoint.resume={run}", "model.architecture.num_hidden_layers=3", f"run_dir={tmp_path}/new")
    assert "is a checkpoint of another model (num_hidden_layers: 2 there, 3 here" in text
    assert "start without checkpoint.resume" in text
    text = first_rank(f"checkpoint.resume={run}", "seed=5", f"run_dir={tmp_path}/new")
    assert "seed=5 but" in text
    assert files(run) == before
    assert not (tmp_path / "new").exists()


def test_resuming_in_place_loses_nothing(first_rank: Refused, straight: Straight, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight("single"), run)
    (run / "summary.json").unlink()
    before = files(run)
    again = ["checkpoint.resume=auto", f"run_dir={run}"]
    assert "hidden_size: 128 there, 64 here" in first_rank("model.architecture.hidden_size=64", *again)
    assert "train.global_batch_size=4 but" in first_rank("train.global_batch_size=4", *again)
    assert files(run) == before


def test_checkpoints_that_are_not_whole(first_rank: Refused, straight: Straight, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight("single"), run)
    for step in (run / "checkpoints").iterdir():
        shard = next(step.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])
    before = files(run)
    text = first_rank(f"checkpoint.resume={run}/checkpoints/step-10", f"run_dir={tmp_path}/new")
    assert "is not a whole checkpoint" in text
    assert "bytes" in text
    assert "holds no whole checkpoint" in first_rank(f"checkpoint.resume={run}", f"run_dir={tmp_path}/new")
    assert files(run) == before
    assert not (tmp_path / "new").exists()


# Real ranks: one message for all of them.


def run_refused(tmp_path: Path, *given: str) -> str:
    """The message of a real command in an empty folder."""
    cwd = tmp_path / "empty-cwd"
    cwd.mkdir(exist_ok=True)
    done = lctrain(*given, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert files(cwd) == {}
    return only_error(done.stderr)


def test_two_ranks_and_a_bad_line(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\nnot json\n")
    given = ["parallel=fsdp_sp", "data=jsonl", f"data.path={path}", f"run_dir={tmp_path}/run", "data.held_out=0"]
    assert f"{path}:2" in run_refused(tmp_path, *words, *given)
    assert not (tmp_path / "run").exists()


def test_an_unknown_key(words: list[str], tmp_path: Path) -> None:
    text = run_refused(tmp_path, *words, "train.max_step=1", f"run_dir={tmp_path}/run")
    assert "train.max_step is not a field" in text
    assert "did you mean train.max_steps" in text


# Verbs about runs.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("export", "run_dir is not given; write python -m lctrain export run_dir=DIR out=OUT"),
        ("export run_dir={run}", "out is not given"),
        ("export run_dir={run} out={out} dtyp=bf16", "dtyp is not a field of export; did you mean dtype?"),
        ("export run_dir={run} out={out} dtype=int8", "dtype=int8 is unknown; it is one of fp32, bf16, fp16"),
        ("export run_dir={out} out={out}", "has no config.yaml; give the directory of a run"),
        ("export run_dir={run} out={run}", "exists and is not empty; choose another folder"),
        ("export run_dir={run} out={out} checkpoint={run}/checkpoints/step-3", "is not a whole checkpoint"),
        ("evaluate run_dir={out}", "has no config.yaml; give a run's directory, or recipe=NAME"),
        ("evaluate run_dir={run} data.held_out=0", "nothing to evaluate on: data.held_out is 0"),
        ("evaluate run_dir={run} optim.lrr=1", "optim.lrr is not a field"),
        ("evaluate run_dir={run} parallel=warp", "parallel=warp does not exist"),
    ],
)
def test_verbs(given: str, said: str, straight: Straight, refused: Refused, tmp_path: Path) -> None:
    run, out = straight("single"), tmp_path / "out"
    before = files(run)
    assert said in refused(*given.format(run=run, out=out).split(), bare=True)
    assert files(run) == before
    assert not out.exists()


def test_a_run_without_a_checkpoint_cannot_be_exported(straight: Straight, refused: Refused, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(straight("single") / "config.yaml", run)
    text = refused("export", f"run_dir={run}", f"out={tmp_path}/out", bare=True)
    assert "holds no whole checkpoint" in text
    assert not (tmp_path / "out").exists()
