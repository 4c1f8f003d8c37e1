"""Checkpoints: written aside and renamed, so that a directory named step-N is whole.

checkpoints/step-N/ holds DCP's shards and state.json: the step, totals, the loss scale, what the
model is, and the size of every file, by which a damaged checkpoint is told from a whole one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lctrain.errors import CheckpointError

STATE_FILE = "state.json"
_FORMAT = 2


@dataclass
class TrainState:
    """What a run carries from step to step besides tensors; JSON in a checkpoint.

    step: updates made, which is also the data cursor. units: tokens or samples seen.
    """

    step: int = 0
    units: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    skipped: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """What must agree between a checkpoint and the run that continues it.

    model: the architecture, as a mapping. optimizer: what its state means. global_batch_size, seed, data: they fix
    the sample order.
    """

    model: dict[str, Any]
    optimizer: dict[str, str]
    global_batch_size: int
    seed: int
    data: str

    def check(self, saved: dict[str, Any], folder: Path, report: Callable[[str], None]) -> None:
        """Raise CheckpointError for another model or sample order; report changed data."""
        mine, theirs = self.model, saved["model"]
        different = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        if different:
            what = ", ".join(f"{k}: {theirs.get(k)} there, {mine.get(k)} here" for k in different[:4])
            raise CheckpointError(
                f"{folder} is a checkpoint of another model ({what}); continue with the same model, "
                "or start without checkpoint.resume"
            )
        for name in sorted(saved["optimizer"].keys() | self.optimizer.keys()):
            there, here = saved["optimizer"].get(name), self.optimizer.get(name)
            if there != here:
                raise CheckpointError(
                    f"{name}={here} but {folder} was trained with {name}={there}, and the optimizer's state means "
                    "something else there; set it back, or export the checkpoint and start a new run from it"
                )
        for name, key in (("train.global_batch_size", "global_batch_size"), ("seed", "seed")):
            if saved[key] != getattr(self, key):
                raise CheckpointError(
                    f"{name}={getattr(self, key)} but {folder} was trained with {saved[key]}, and the order of the "
                    f"data depends on it; set {name}={saved[key]}, or export the checkpoint and start a new run from it"
                )
        if saved["data"] != self.data:
            report(f"the data differ from those {folder} was trained on; sequences may repeat or be left out")


def step_dir(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"step-{step}"


def save_checkpoint(
    root: Path,
    state: TrainState,
    identity: Identity,
    *,
    write_tensors: Callable[[Path], None],
    barrier: Callable[[], None],
    is_main: bool,
    keep: int,
) -> Path:
    """Write a checkpoint of `state` under `root` and drop all but the last `keep`.

    A collective: every rank calls it. After any crash, `root` holds whole checkpoints only, besides
    folders whose name starts with a dot.
    """
    final = step_dir(root, state.step)
    aside = root / f".{final.name}.partial"
    if is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    barrier()
    write_tensors(aside)
    barrier()
    if is_main:
        record = {"format": _FORMAT, **vars(state), **vars(identity)}
        record["files"] = {p.name: p.stat().st_size for p in sorted(aside.iterdir())}
        _write_synced(aside / STATE_FILE, json.dumps(record, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _sync_dir(root)
        for old in whole_checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    barrier()
    return final


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_dir(path.parent)


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def whole_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints under `root`, oldest first."""
    found = [p for p in root.glob("step-*") if p.name[5:].isdigit() and why_not_whole(p) is None]
    return sorted(found, key=lambda p: int(p.name[5:]))


def why_not_whole(folder: Path) -> str | None:
    """None for a whole checkpoint, else what is wrong with it."""
    try:
        record = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {STATE_FILE}"
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return f"its {STATE_FILE} is damaged"
    if record.get("format") != _FORMAT:
        return f"its format is {record.get('format')}, this version reads {_FORMAT}"
    if not {"files", *TrainState.__dataclass_fields__} <= record.keys():
        return f"its {STATE_FILE} is damaged"
    for name, size in record["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None


def find(resume: str, run_dir: Path, report: Callable[[str], None]) -> Path | None:
    """The checkpoint `checkpoint.resume` means: a path, or `auto` for the last whole one of run_dir.

    Returns None for `auto` with nothing to continue. Interrupted checkpoints are passed over, and said so.
    Raises CheckpointError when a path holds no whole checkpoint.
    """
    if resume == "auto":
        return latest(run_dir / "checkpoints", report)
    path = Path(resume).expanduser()
    if (path / "checkpoints").is_dir() or not path.name.startswith("step-"):
        found = latest(path / "checkpoints" if (path / "checkpoints").is_dir() else path, report)
        if found is None:
            raise CheckpointError(
                f"checkpoint.resume={resume} holds no whole checkpoint; give a run directory or a "
                "checkpoints/step-N folder"
            )
        return found
    if (reason := why_not_whole(path)) is not None:
        raise CheckpointError(
            f"checkpoint.resume={resume} is not a whole checkpoint: {reason}; give another one, or "
            "the run directory for the last whole one"
        )
    return path


def latest(root: Path, report: Callable[[str], None]) -> Path | None:
    """The last whole checkpoint under `root`; the interrupted ones after it are reported."""
    whole = whole_checkpoints(root)
    last = int(whole[-1].name[5:]) if whole else -1
    for path in sorted(root.glob("step-*")) + sorted(root.glob(".step-*.partial")):
        number = path.name.removeprefix(".").removesuffix(".partial")[5:]
        if number.isdigit() and int(number) > last:
            reason = "it was interrupted" if path.name.startswith(".") else why_not_whole(path)
            report(f"checkpoint {path} is ignored: {reason}")
    return whole[-1] if whole else None


def read_state(folder: Path) -> tuple[TrainState, dict[str, Any]]:
    """The TrainState of a whole checkpoint, and the full record it is part of."""
    record = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    return TrainState(**{k: record[k] for k in TrainState.__dataclass_fields__}), record
