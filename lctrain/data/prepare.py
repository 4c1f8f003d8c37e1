"""From a configuration to sequences: tokenise once, open quickly ever after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from lctrain.config.data import DocumentsConfig, RecordsConfig
from lctrain.data.cache import build_once
from lctrain.data.plan import Part, load_plan
from lctrain.data.prepared import PreparedData
from lctrain.data.sources import Source, open_source
from lctrain.data.table import TokenTable
from lctrain.data.text_tokenizer import TextTokenizer
from lctrain.data.tokenise import tokenise
from lctrain.data.tokenizer import check_fits, load_tokenizer
from lctrain.errors import DataError

FORMAT_VERSION = 1
PLACES_SHOWN = 3
META = "meta.json"


def prepare(
    cfg: DocumentsConfig,
    *,
    model_path: str | None,
    vocab_size: int | None,
    split: Literal["train", "eval"],
    trust_remote_code: bool = False,
    report: Callable[[str], None] = print,
) -> PreparedData | None:
    """The sequences of one split; None for `eval` when the configuration names no validation data.

    model_path: where data.tokenizer=null finds its tokenizer. vocab_size: rows of the model's
    embedding, to check the tokenizer against; None checks nothing. The tokens are kept under
    data.cache_dir, named by a hash of the documents, the tokenizer and the settings they depend on.
    Raises DataError for what is missing, empty, malformed or does not fit the model.
    """
    separate = split == "eval" and cfg.eval_path is not None
    if split == "eval" and not separate and not cfg.held_out:
        return None
    begun = time.perf_counter()
    tokenizer = load_tokenizer(cfg.tokenizer, model_path, trust_remote_code=trust_remote_code)
    if vocab_size is not None:
        check_fits(tokenizer, vocab_size)
    if separate:
        source = open_source(cfg, field="data.eval_path", path=cfg.eval_path)
    else:
        source = open_source(cfg, path=cfg.path)
    key = _key(cfg, source, tokenizer)
    folder = Path(cfg.cache_dir).expanduser() / key
    try:
        built = build_once(folder, partial(_build, cfg=cfg, source=source, tokenizer=tokenizer), report=report)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cfg.cache_dir} cannot be used ({error}); give a folder with room that you may write"
        ) from error
    prepared = _open(folder, cfg, part=_part(cfg, split), tokenizer=tokenizer)
    seconds = time.perf_counter() - begun
    report(f"data: {source.title} ({split}): {prepared.summary}; {'tokenised' if built else 'cached'}, {seconds:.2f} s")
    if prepared.skipped and split == "train":
        more = "; ..." if prepared.skipped > len(prepared.skipped_places) else ""
        report(f"data: skipped {prepared.skipped} bad records: {'; '.join(prepared.skipped_places)}{more}")
    return prepared


def open_prepared(
    cfg: DocumentsConfig,
    *,
    model_path: str | None,
    key: str,
    split: Literal["train", "eval"],
    trust_remote_code: bool = False,
) -> PreparedData:
    """What `prepare` made, on another rank: `key` is its PreparedData.key, so nothing is read twice."""
    tokenizer = load_tokenizer(cfg.tokenizer, model_path, trust_remote_code=trust_remote_code)
    return _open(Path(cfg.cache_dir).expanduser() / key, cfg, part=_part(cfg, split), tokenizer=tokenizer)


def _part(cfg: DocumentsConfig, split: str) -> Part:
    if not cfg.held_out:
        return Part.whole
    return Part.held if split == "eval" else Part.train


def _key(cfg: DocumentsConfig, source: Source, tokenizer: TextTokenizer) -> str:
    fields = [cfg.text_field, cfg.messages_field] if isinstance(cfg, RecordsConfig) else []
    try:
        content = source.digest()
    except OSError as error:
        raise DataError(f"{source.title} cannot be read ({error}); make its files readable") from error
    parts = [FORMAT_VERSION, cfg.kind, content, tokenizer.fingerprint, cfg.on_bad_record.name, fields]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _build(folder: Path, *, cfg: DocumentsConfig, source: Source, tokenizer: TextTokenizer) -> None:
    """Fill a cache folder: tokens-N.arrow and META."""
    scratch = folder / "scratch"
    scratch.mkdir()
    written = tokenise(
        source,
        tokenizer,
        folder=scratch,
        chat=isinstance(cfg, RecordsConfig),
        on_bad_record=cfg.on_bad_record,
        num_proc=cfg.num_proc or min(os.cpu_count() or 1, 8),
    )
    for number, path in enumerate(written):
        path.rename(folder / f"tokens-{number:05d}.arrow")
    shutil.rmtree(scratch)
    table = TokenTable(_token_files(folder))
    problems = table.problems()
    if len(problems) == len(table):
        raise DataError(
            f"{source.title} has no documents: all {len(problems)} records are bad, the first {problems[0]}; mend them"
        )
    meta = {"skipped": len(problems), "skipped_places": problems[:PLACES_SHOWN]}
    (folder / META).write_text(json.dumps(meta), encoding="utf-8")


def _open(folder: Path, cfg: DocumentsConfig, *, part: Part, tokenizer: TextTokenizer) -> PreparedData:
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    table = TokenTable(_token_files(folder))
    plan = load_plan(folder, table, part=part, held_out=cfg.held_out, max_length=cfg.max_length, packing=cfg.packing)
    return PreparedData(table=table, plan=plan, tokenizer=tokenizer, key=folder.name, **meta)


def _token_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tokens-*.arrow"))
