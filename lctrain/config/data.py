"""Where documents come from and how they become sequences of `max_length` tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lctrain.config.checks import MISSING, require


class OnBadRecord(Enum):
    """What a record that does not parse does to the run."""

    error = "error"
    skip = "skip"


@dataclass(kw_only=True)
class DataConfig:
    """Base of every kind of data. prefetch: steps prepared ahead of the one that trains."""

    kind: str = MISSING
    prefetch: int = 2

    def __post_init__(self) -> None:
        require(self.prefetch >= 0, "data.prefetch", self.prefetch, "must not be negative", "0 turns prefetching off")


@dataclass(kw_only=True)
class DocumentsConfig(DataConfig):
    """What every text source shares.

    path: the source (a folder, a file, or a Hugging Face data set name for data=hub).
    max_length: tokens per sequence, always the global length before any sequence split.
    packing: several documents share a sequence (they never see each other); off: one each, padded.
    tokenizer: `byte`, a local folder, or null for the one in model.path.
    held_out: fraction of the documents kept for validation, chosen by document, never trained on.
    eval_path: a separate source of the same kind for validation; excludes held_out.
    num_proc: tokenising processes; null means one for each core, at most 8.
    """

    path: str | None = None
    max_length: int = 2048
    packing: bool = True
    tokenizer: str | None = None
    held_out: float = 0.0
    eval_path: str | None = None
    cache_dir: str = "~/.cache/lctrain"
    num_proc: int | None = None
    on_bad_record: OnBadRecord = OnBadRecord.error

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_length >= 2,
            "data.max_length",
            self.max_length,
            "must be at least 2 tokens",
            "set the sequence length in tokens, e.g. data.max_length=32768",
        )
        require(
            0.0 <= self.held_out < 1.0,
            "data.held_out",
            self.held_out,
            "must be a fraction in [0, 1)",
            "e.g. data.held_out=0.01 keeps one document in a hundred for validation",
        )
        require(
            not (self.held_out and self.eval_path),
            "data.held_out",
            self.held_out,
            f"cannot be combined with data.eval_path={self.eval_path}",
            "keep one of the two",
        )
        require(
            self.num_proc is None or self.num_proc >= 1,
            "data.num_proc",
            self.num_proc,
            "must be at least 1",
            "or null for one process a core",
        )


@dataclass(kw_only=True)
class TextConfig(DocumentsConfig):
    """A folder (or one file) of text or source files, one document a file; UTF-8.

    extensions: endings taken, each with its dot; empty means every file.
    exclude: names of folders that are not entered.
    """

    kind: str = "text"
    extensions: list[str] = field(default_factory=lambda: [".txt", ".md", ".rst", ".py"])
    exclude: list[str] = field(default_factory=lambda: [".git", "__pycache__", "node_modules"])


@dataclass(kw_only=True)
class RecordsConfig(DocumentsConfig):
    """Records with a `text` field, or chat `messages` whose assistant turns alone carry loss."""

    text_field: str = "text"
    messages_field: str = "messages"


@dataclass(kw_only=True)
class JsonlConfig(RecordsConfig):
    """A .jsonl file, or a folder of them."""

    kind: str = "jsonl"


@dataclass(kw_only=True)
class ParquetConfig(RecordsConfig):
    """A .parquet file, or a folder of them."""

    kind: str = "parquet"


@dataclass(kw_only=True)
class HubConfig(RecordsConfig):
    """A Hugging Face data set by name (or a local folder `datasets` can load).

    split: which split to train on. subset: the data set's configuration name.
    """

    kind: str = "hub"
    split: str = "train"
    subset: str | None = None
