"""Checkpoints as files: whole or not, found or passed over, rotated, of this model or another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lctrain.errors import CheckpointError
from lctrain.train.checkpoint import (
    Identity,
    TrainState,
    find,
    latest,
    read_state,
    save_checkpoint,
    whole_checkpoints,
    why_not_whole,
)

IDENTITY = Identity(
    model={"layers": 2, "width": 8}, optimizer={"optim": "adamw"}, global_batch_size=4, seed=1, data="abc"
)


def save(root: Path, step: int, *, keep: int = 9, body: str = "tensors") -> Path:
    """A checkpoint whose tensors are a line of text."""
    return save_checkpoint(
        root,
        TrainState(step=step, units=10.0 * step, first_loss=5.0, last_loss=4.0, loss_scale={"value": 2.0}),
        IDENTITY,
        write_tensors=lambda folder: _write(folder, body),
        barrier=lambda: None,
        is_main=True,
        keep=keep,
    )


def _write(folder: Path, body: str) -> None:
    (folder / "__0_0.distcp").write_text(body)
    (folder / ".metadata").write_text("index")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def steps(root: Path) -> list[int]:
    """Steps of the whole checkpoints, in order."""
    return [int(p.name.removeprefix("step-")) for p in whole_checkpoints(root)]


def test_state_and_identity_come_back(root: Path) -> None:
    folder = save(root, 3)
    assert folder == root / "step-3"
    assert why_not_whole(folder) is None
    state, record = read_state(folder)
    assert state == TrainState(step=3, units=30.0, first_loss=5.0, last_loss=4.0, loss_scale={"value": 2.0})
    IDENTITY.check(record, folder, pytest.fail)
    assert set(record["files"]) == {"__0_0.distcp", ".metadata"}
    assert {p.name for p in root.iterdir()} == {"step-3"}  # nothing is left aside


def test_the_last_n_are_kept_by_number(root: Path) -> None:
    for step in (8, 9, 10, 11):
        save(root, step, keep=2)
    assert steps(root) == [10, 11]
    assert {p.name for p in root.iterdir()} == {"step-10", "step-11"}


def test_rotation_leaves_what_is_not_a_whole_checkpoint(root: Path) -> None:
    save(root, 1)
    (root / "step-0").mkdir()
    (root / "step-best").mkdir()
    save(root, 2, keep=1)
    assert {p.name for p in root.iterdir()} == {"step-0", "step-2", "step-best"}


def test_saving_a_step_again_replaces_it(root: Path) -> None:
    save(root, 1, body="old")
    save(root, 1, body="newer")
    assert (root / "step-1" / "__0_0.distcp").read_text() == "newer"
    assert why_not_whole(root / "step-1") is None


def test_a_crash_while_writing_leaves_the_last_whole_one(root: Path) -> None:
    save(root, 1)

    def crash(folder: Path) -> None:
        _write(folder, "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(
            root, TrainState(step=2), IDENTITY, write_tensors=crash, barrier=lambda: None, is_main=True, keep=1
        )
    assert steps(root) == [1]
    said: list[str] = []
    assert latest(root, said.append) == root / "step-1"
    assert said == [f"checkpoint {root / '.step-2.partial'} is ignored: it was interrupted"]
    save(root, 2)  # the next attempt starts clean
    assert (root / "step-2" / "__0_0.distcp").read_text() == "tensors"
    assert not (root / ".step-2.partial").exists()


def test_ranks_that_are_not_main_write_tensors_only(root: Path) -> None:
    (root / ".step-5.partial").mkdir(parents=True)
    waited: list[int] = []
    save_checkpoint(
        root,
        TrainState(step=5),
        IDENTITY,
        write_tensors=lambda folder: _write(folder, "mine"),
        barrier=lambda: waited.append(1),
        is_main=False,
        keep=1,
    )
    assert {p.name for p in (root / ".step-5.partial").iterdir()} == {"__0_0.distcp", ".metadata"}
    assert len(waited) == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "__0_0.distcp").write_text("tensor"), "__0_0.distcp has 6 bytes, 7 were written"),
        (lambda d: (d / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda d: (d / ".metadata").unlink(), ".metadata is missing"),
        (lambda d: (d / "state.json").unlink(), "it has no state.json"),
        (lambda d: (d / "state.json").write_text('{"format": 2, "st'), "its state.json is damaged"),
        (lambda d: (d / "state.json").write_text("[]"), "its state.json is damaged"),
        (lambda d: (d / "state.json").write_text('{"format": 2}'), "its state.json is damaged"),
        (lambda d: (d / "state.json").write_text('{"format": 7}'), "its format is 7, this version reads 2"),
    ],
)
def test_damage_is_told_passed_over_and_refused_by_path(root: Path, damage, reason: str) -> None:
    save(root, 1)
    damage(save(root, 2))
    assert why_not_whole(root / "step-2") == reason
    said: list[str] = []
    assert find("auto", root.parent, said.append) == root / "step-1"
    assert said == [f"checkpoint {root / 'step-2'} is ignored: {reason}"]
    with pytest.raises(CheckpointError) as caught:
        find(str(root / "step-2"), root.parent, said.append)
    assert f"checkpoint.resume={root / 'step-2'} is not a whole checkpoint: {reason}" in str(caught.value)


def test_find_by_run_by_folder_and_by_step(root: Path, tmp_path: Path) -> None:
    save(root, 1)
    save(root, 12)
    for resume, run_dir in (
        ("auto", tmp_path),
        (str(tmp_path), Path("elsewhere")),
        (str(root), Path("elsewhere")),
        (str(root / "step-12"), Path("elsewhere")),
    ):
        assert find(resume, run_dir, pytest.fail) == root / "step-12"
    assert find(str(root / "step-1"), tmp_path, pytest.fail) == root / "step-1"


def test_nothing_to_continue(root: Path, tmp_path: Path) -> None:
    assert find("auto", tmp_path, pytest.fail) is None
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        find(str(tmp_path), tmp_path, pytest.fail)
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        find(str(tmp_path / "nowhere"), tmp_path, pytest.fail)
    with pytest.raises(CheckpointError, match=r"it has no state\.json"):
        find(str(root / "step-9"), tmp_path, pytest.fail)


def test_only_interrupted_ones_after_the_last_are_spoken_of(root: Path) -> None:
    save(root, 1)
    shutil.copytree(save(root, 3), root / "step-2")
    (root / "step-2" / "state.json").unlink()
    assert latest(root, pytest.fail) == root / "step-3"


def test_identity(tmp_path: Path) -> None:
    saved = json.loads(json.dumps(vars(IDENTITY)))

    def check(**changes: object) -> list[str]:
        said: list[str] = []
        Identity(**{**vars(IDENTITY), **changes}).check(saved, tmp_path, said.append)
        return said

    assert check() == []
    assert "the data differ" in check(data="other")[0]
    with pytest.raises(CheckpointError, match=r"optim\.form=paper but .* was trained with optim\.form=None"):
        check(optimizer={"optim": "adamw", "optim.form": "paper"})
    with pytest.raises(CheckpointError) as caught:
        check(model={"layers": 3, "width": 8})
    assert f"{tmp_path} is a checkpoint of another model (layers: 2 there, 3 here)" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"extra: None there, 1 here"):
        check(model={**IDENTITY.model, "extra": 1})
    with pytest.raises(CheckpointError, match=r"train\.global_batch_size=8 but .* was trained with 4"):
        check(global_batch_size=8)
    with pytest.raises(CheckpointError, match=r"seed=2 but .* was trained with 1.*; set seed=1"):
        check(seed=2)
