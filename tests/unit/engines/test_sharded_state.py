"""Tensors through DCP in one process: they come back, an index cannot run code, shapes are checked."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lctrain.engines.sharded_state import TensorReader, model_tensors, optimizer_tensors, read, write
from lctrain.errors import CheckpointError
from tests.support.ranks import pool


class Model(nn.Module):
    """Two weights of which one has two names, a persistent buffer and one that is not."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("derived", torch.rand(2), persistent=False)


def trained() -> tuple[Model, torch.optim.Optimizer]:
    """A model and an optimizer that has state."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.head(model.norm(model.embed.weight)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _write(ranks: Any, folder: str) -> list[str]:
    model, optimizer = trained()
    write(Path(folder), model, optimizer)
    return sorted([*model_tensors(model), *optimizer_tensors(model, optimizer)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `trained`, written by one rank (saving is a collective)."""
    path = tmp_path_factory.mktemp("written")
    names = pool(1).run(_write, folder=str(path))[0]
    assert "model.embed.weight" in names
    assert not any("head" in name or "derived" in name for name in names)  # tied once; what is derived, never
    assert "optim.embed.weight.exp_avg" in names
    return path


def test_reading_needs_no_process_group_and_gives_every_tensor_back(folder: Path) -> None:
    model, optimizer = trained()
    torch.manual_seed(1)
    other = Model()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    read(folder, other, fresh)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert other.head.weight is other.embed.weight
    assert not torch.equal(other.derived, model.derived)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == fresh.state[q].keys()
        assert all(torch.equal(optimizer.state[p][k], fresh.state[q][k]) for k in optimizer.state[p])


def test_another_model_is_refused_before_anything_is_read(folder: Path) -> None:
    wide = Model(width=5)
    before = wide.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"embed\.weight is \[3, 4\] but the model's is \[3, 5\]"):
        read(folder, wide)
    assert torch.equal(wide.embed.weight, before)
    extra = Model()
    extra.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"has no extra\.weight; it is a checkpoint of another model"):
        read(folder, extra)


def test_an_average_that_was_not_kept_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no ema\.a \(and 1 more\): .*; leave classification\.ema_decay"):
        read(folder, Model(), companions={"ema.a": torch.zeros(1), "ema.b": torch.zeros(1)})


class Malicious:
    """Unpickling it would run a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class MaliciousEval:
    """Unpickling it would evaluate an expression."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 + 1",)


def test_an_index_cannot_run_code(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    for thing, name in ((Malicious(f"touch {proof}"), "system"), (MaliciousEval(), "builtins.eval")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(CheckpointError) as caught:
            TensorReader(tmp_path).read_metadata()
        assert name in str(caught.value)
        assert "use another checkpoint" in str(caught.value)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch", "load"),
        ("builtins", "getattr"),
        ("pathlib", "Path"),
    ],
)
def test_only_the_names_an_index_needs_can_be_named(tmp_path: Path, module: str, name: str) -> None:
    # Protocol 4: two strings on the stack, then STACK_GLOBAL, which looks dotted names up.
    text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93.")
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        TensorReader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", b"\x80\x04]."])
def test_a_damaged_index_is_an_error_of_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint index"):
        TensorReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint index"):
        TensorReader(tmp_path / "nowhere").read_metadata()
