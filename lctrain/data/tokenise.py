"""Documents to an Arrow table of tokens, on several processes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lctrain.config.data import OnBadRecord
from lctrain.data.records import BadRecord, Content
from lctrain.data.sources import Source
from lctrain.data.table import IDS
from lctrain.data.text_tokenizer import TextTokenizer
from lctrain.errors import DataError

ERROR_FILE = "error.txt"
ROWS_IN_MEMORY = 100


def tokenise(
    source: Source, tokenizer: TextTokenizer, *, folder: Path, chat: bool, on_bad_record: OnBadRecord, num_proc: int
) -> list[Path]:
    """Tokenise every document of `source` into Arrow files below `folder`; their paths, in document order.

    Columns: input_ids (the bytes of an int32 array: lists would pass through Python integers, nine
    times the memory), loss_mask (the bytes of a bool array, only with `chat`; null where every token
    carries loss), identity (hash of the document's tokens), problem (null, or why and where a record
    was skipped: such a row has no tokens). Raises DataError for the first bad record met under
    on_bad_record=error.
    """
    import datasets

    if not sys.stderr.isatty():  # a bar redrawn into a log file is noise
        datasets.disable_progress_bars()
    features = {
        "input_ids": datasets.Value("large_binary"),
        "identity": datasets.Value("int64"),
        "problem": datasets.Value("string"),
    }
    if chat:
        features["loss_mask"] = datasets.Value("large_binary")
    error = folder / ERROR_FILE
    try:
        table = datasets.Dataset.from_generator(
            _rows,
            features=datasets.Features(features),
            cache_dir=str(folder),
            gen_kwargs={
                "shards": source.shards,
                "source": source,
                "tokenizer": tokenizer,
                "chat": chat,
                "skip": on_bad_record is OnBadRecord.skip,
                "error": error,
            },
            num_proc=None if min(num_proc, len(source.shards)) == 1 else min(num_proc, len(source.shards)),
            # The library would hash the tokenizer to name its own cache; ours is named already.
            fingerprint="lctrain",
            writer_batch_size=ROWS_IN_MEMORY,
        )
    except datasets.exceptions.DatasetGenerationError as failure:
        # An exception loses its cause on the way out of a worker process: the file keeps it.
        if error.is_file():
            raise DataError(error.read_text(encoding="utf-8")) from failure
        raise
    return [Path(file["filename"]) for file in table.cache_files]


def _rows(
    shards: list[Any], source: Source, tokenizer: TextTokenizer, chat: bool, skip: bool, error: Path
) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for index, content in source.read(shard):
            problem, mask = None, None
            try:
                ids, mask = _encode(content, tokenizer)
            except BadRecord as bad:
                place = source.place(shard, index)
                if not skip:
                    _leave(error, f"{source.full_place(place)}: {bad}; mend it, or set data.on_bad_record=skip")
                ids, problem = np.zeros(0, np.int32), f"{place}: {bad}"
            except DataError as fault:
                _leave(error, str(fault))
            row = {"input_ids": ids.astype(IDS).tobytes(), "identity": _identity(ids), "problem": problem}
            yield row | ({"loss_mask": None if mask is None else mask.tobytes()} if chat else {})


def _encode(content: Content | BadRecord, tokenizer: TextTokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    if isinstance(content, BadRecord):
        raise content
    if not isinstance(content, str):
        return tokenizer.encode_messages(content)
    ids = tokenizer.tokens(content)
    if not len(ids):
        raise BadRecord("is a document with no tokens")
    return tokenizer.frame(ids), None


def _identity(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little", signed=True)


def _leave(error: Path, message: str) -> NoReturn:
    """Write `message` where the first process will look, whole, then raise it."""
    part = error.with_name(f"{error.name}.{os.getpid()}")
    part.write_text(message, encoding="utf-8")
    part.replace(error)
    raise DataError(message)
