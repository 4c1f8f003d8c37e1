from __future__ import annotations

import json
from pathlib import Path

import pytest

from lctrain.config.data import JsonlConfig, TextConfig
from lctrain.data.prepare import prepare
from lctrain.data.prepared import PreparedData


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Seven documents of different lengths in nested folders."""
    root = tmp_path / "texts"
    for number, words in enumerate([3, 40, 7, 1, 90, 12, 25]):
        file = root / f"part{number % 2}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join(f"w{number}x{word}" for word in range(words)), encoding="utf-8")
    return root


@pytest.fixture
def open_texts(texts: Path, tmp_path: Path):
    """Prepare `texts` with the byte tokenizer; keywords go to the configuration."""

    def prepared(split: str = "train", report=lambda line: None, **settings) -> PreparedData:
        settings = {"path": str(texts), "tokenizer": "byte", "max_length": 64, "num_proc": 1} | settings
        cfg = TextConfig(cache_dir=str(tmp_path / "cache"), **settings)
        return prepare(cfg, model_path=None, vocab_size=None, split=split, report=report)

    return prepared


@pytest.fixture
def open_jsonl(tmp_path: Path):
    """Write lines (objects, or text as it is) to rows.jsonl and prepare it."""

    def prepared(lines: list, report=lambda line: None, **settings) -> PreparedData:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
        settings = {"tokenizer": "byte", "max_length": 512, "num_proc": 1} | settings
        cfg = JsonlConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **settings)
        return prepare(cfg, model_path=None, vocab_size=None, split="train", report=report)

    return prepared
