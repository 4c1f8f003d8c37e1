from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from lctrain.config.data import HubConfig, OnBadRecord, ParquetConfig, TextConfig
from lctrain.data import prepare as prepare_module
from lctrain.data.cache import build_once
from lctrain.data.plan import held_out_rows
from lctrain.data.prepare import open_prepared, prepare
from lctrain.data.prepared import PreparedData
from lctrain.errors import DataError
from lctrain.ops.text_batch import IGNORE

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def documents_of(prepared: PreparedData) -> list[bytes]:
    """The text of every document, put together from its pieces, sorted."""
    parts: dict[int, dict[int, np.ndarray]] = {}
    for pack in range(len(prepared)):
        rows = prepared.plan.pieces[prepared.plan.offsets[pack] : prepared.plan.offsets[pack + 1]]
        for (row, start, *_), piece in zip(rows.tolist(), prepared.sample(pack), strict=True):
            parts.setdefault(row, {})[start] = piece.ids
    whole = [np.concatenate([pieces[start] for start in sorted(pieces)]) for pieces in parts.values()]
    assert all(ids[0] == 256 and ids[-1] == 257 for ids in whole)
    return sorted(bytes(ids[1:-1].astype(np.uint8)) for ids in whole)


def texts_of(folder: Path) -> list[bytes]:
    return sorted(file.read_bytes() for file in folder.rglob("*.txt"))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_every_token_is_kept(open_texts, texts: Path, packing: bool, num_proc: int) -> None:
    prepared = open_texts(packing=packing, num_proc=num_proc, max_length=33)
    assert documents_of(prepared) == texts_of(texts)
    assert prepared.documents == 7
    assert prepared.tokens == sum(len(text) + 2 for text in texts_of(texts))
    samples = [prepared.sample(i) for i in range(len(prepared))]
    assert all(sum(len(p.ids) for p in sample) <= 33 for sample in samples)
    if not packing:
        assert all(len(sample) == 1 for sample in samples)
    # Every token but the first of a document is a target once, across the cuts of long ones too.
    targets = np.concatenate([p.labels for sample in samples for p in sample])
    assert (targets != IGNORE).sum() == prepared.tokens - prepared.documents
    assert (targets == 257).sum() == 7


def test_processes_do_not_change_the_result(open_texts, tmp_path: Path) -> None:
    one = open_texts(num_proc=1)
    shutil.rmtree(tmp_path / "cache")
    two = open_texts(num_proc=2)
    assert one.fingerprint == two.fingerprint
    assert np.array_equal(one.table.identities, two.table.identities)


def test_real_text(tmp_path: Path) -> None:
    lines: list[str] = []
    cfg = TextConfig(
        path=str(Path(asyncio.__file__).parent), cache_dir=str(tmp_path), tokenizer="byte", max_length=4096,
        num_proc=2, extensions=[".py"],
    )  # fmt: skip
    prepared = prepare(cfg, model_path=None, vocab_size=259, split="train", report=lines.append)
    assert documents_of(prepared) == sorted(file.read_bytes() for file in Path(asyncio.__file__).parent.glob("*.py"))
    assert len(prepared) <= prepared.tokens // 4096 + 2
    again = prepare(cfg, model_path=None, vocab_size=259, split="train", report=lines.append)
    assert again.fingerprint == prepared.fingerprint
    assert "tokenised" in lines[0]
    assert "cached" in lines[-1]


def test_a_hit_tokenises_nothing(open_texts, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_texts()

    def never(*args: object, **options: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(prepare_module, "tokenise", never)
    assert open_texts().key == first.key
    # Length, packing and the split only lay the same tokens out anew.
    for settings in ({"max_length": 50}, {"packing": False}, {"held_out": 0.3}):
        other = open_texts(**settings)
        assert other.key == first.key
        assert other.fingerprint != first.fingerprint


def test_another_rank_opens_by_key(open_texts, texts: Path, tmp_path: Path) -> None:
    first = open_texts(held_out=0.3)
    cfg = TextConfig(path=str(texts), tokenizer="byte", max_length=64, held_out=0.3, cache_dir=str(tmp_path / "cache"))
    same = open_prepared(cfg, model_path=None, key=first.key, split="train")
    assert same.fingerprint == first.fingerprint
    assert documents_of(same) == documents_of(first)


def test_the_key_follows_content_tokenizer_and_settings(open_texts, texts: Path, tmp_path: Path) -> None:
    from lctrain.data.byte_tokenizer import ByteTokenizer

    ByteTokenizer().save(tmp_path / "byte")
    keys = [open_texts().key, open_texts(tokenizer=str(tmp_path / "byte")).key]
    keys.append(open_texts(on_bad_record=OnBadRecord.skip).key)
    (texts / "more.txt").write_text("more")
    keys.append(open_texts().key)
    assert len(set(keys)) == len(keys)


def test_moving_the_source_keeps_the_cache(open_texts, texts: Path, tmp_path: Path) -> None:
    key = open_texts().key
    texts.rename(tmp_path / "elsewhere")
    assert open_texts(path=str(tmp_path / "elsewhere")).key == key


def test_tokenizer_must_fit(texts: Path, tmp_path: Path) -> None:
    cfg = TextConfig(path=str(texts), cache_dir=str(tmp_path), tokenizer="byte")
    with pytest.raises(DataError, match="does not fit the model's vocabulary"):
        prepare(cfg, model_path=None, vocab_size=100, split="train")


def test_chat_and_text_records(open_jsonl) -> None:
    prepared = open_jsonl([{"messages": CHAT}, {"text": "plain"}, {"messages": CHAT[:1] + CHAT}])
    trained = {}
    for piece in (piece for i in range(len(prepared)) for piece in prepared.sample(i)):
        labels = piece.labels[piece.labels != IGNORE]
        trained[len(piece.ids)] = bytes(labels[labels < 256].astype(np.uint8))
    assert sorted(trained.values()) == [b"plain", b"yes<|im_end|>\n", b"yes<|im_end|>\n"]


@pytest.mark.parametrize("kind", [ParquetConfig, HubConfig])
def test_tables_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr("lctrain.data.hub.SHARD_ROWS", 3)
    texts = [f"row {number}" for number in range(7)]
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows" / "train.parquet", row_group_size=3)
    cfg = kind(path=str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"), tokenizer="byte", num_proc=2)
    prepared = prepare(cfg, model_path=None, vocab_size=None, split="train", report=lambda line: None)
    assert documents_of(prepared) == [text.encode() for text in texts]


def test_loss_mask_holds_across_a_cut(open_jsonl) -> None:
    whole = open_jsonl([{"messages": CHAT}])
    length = whole.tokens
    for cut in range(2, length):
        prepared = open_jsonl([{"messages": CHAT}], max_length=cut, packing=False)
        labels = np.concatenate([prepared.sample(i)[0].labels for i in range(len(prepared))])
        assert np.array_equal(labels, whole.sample(0)[0].labels)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_bad_line_stops_with_its_place(open_jsonl, tmp_path: Path, monkeypatch, num_proc: int) -> None:
    monkeypatch.setattr("lctrain.data.sources.SHARD_BYTES", 20)
    with pytest.raises(DataError) as failure:
        open_jsonl([{"text": "a"}, {"text": "b"}, "{oops", {"text": "c"}], num_proc=num_proc)
    assert f"{tmp_path / 'rows.jsonl'}:3: does not parse as JSON" in str(failure.value)
    assert "data.on_bad_record=skip" in str(failure.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_empty_file_stops_with_its_name(open_texts, texts: Path) -> None:
    (texts / "part0" / "empty.txt").touch()
    with pytest.raises(DataError, match=r"part0/empty\.txt: is empty: a document with no tokens"):
        open_texts()
    prepared = open_texts(on_bad_record=OnBadRecord.skip)
    assert (prepared.documents, prepared.skipped) == (7, 1)


def test_skipping_counts_and_names(open_jsonl) -> None:
    lines = ["{bad"] * 5 + [{"text": "good"}, {"text": ""}]
    for _ in range(2):  # the second time from the cache
        told: list[str] = []
        prepared = open_jsonl(lines, on_bad_record=OnBadRecord.skip, report=told.append)
        assert (prepared.documents, prepared.skipped) == (1, 6)
        assert any("skipped 6 bad records: rows.jsonl:1: does not parse" in line for line in told)


@pytest.mark.parametrize("lines", [["{bad"], ["", " "]])
def test_no_documents_left(open_jsonl, lines: list[str]) -> None:
    with pytest.raises(DataError, match=r"data\.path=.* has no documents"):
        open_jsonl(lines, on_bad_record=OnBadRecord.skip)


def test_held_out_documents_are_never_trained_on(open_texts, texts: Path) -> None:
    train, held = open_texts(held_out=0.3), open_texts("eval", held_out=0.3)
    assert held.documents == 2
    assert sorted(documents_of(train) + documents_of(held)) == texts_of(texts)
    assert documents_of(open_texts("eval", held_out=0.01))
    assert open_texts("eval") is None


def test_eval_path_is_a_source_of_its_own(open_texts, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "validation.txt").write_text("validate")
    settings = {"eval_path": str(tmp_path / "validation.txt")}
    assert documents_of(open_texts("eval", **settings)) == [b"validate"]
    assert documents_of(open_texts(**settings)) == texts_of(texts)
    with pytest.raises(DataError, match=r"data\.eval_path=.*gone"):
        open_texts("eval", eval_path=str(tmp_path / "gone"))


def test_held_out_goes_by_content() -> None:
    identities = np.random.default_rng(0).permutation(1000).astype(np.int64)
    held = held_out_rows(identities, 0.1)
    assert held.sum() == 100
    shuffle = np.random.default_rng(1).permutation(1000)
    assert set(identities[shuffle][held_out_rows(identities[shuffle], 0.1)]) == set(identities[held])
    copies = held_out_rows(np.array([5, 1, 1, 9, 7], np.int64), 0.2)
    assert copies.tolist() == [False, True, True, False, False]
    assert held_out_rows(np.zeros(4, np.int64), 0.5).sum() == 2
    assert held_out_rows(np.arange(2), 0.9).tolist() == [True, False]
    with pytest.raises(DataError, match="at least two documents"):
        held_out_rows(np.arange(1), 0.1)


def test_an_unusable_cache_folder(open_texts, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"data\.cache_dir=.*cannot be used"):
        open_texts()


def test_what_an_interrupted_build_leaves_is_no_cache(open_texts, texts: Path, tmp_path: Path) -> None:
    key = open_texts().key
    cache = tmp_path / "cache"
    (cache / key).rename(cache / f"{key}.tmp-1")
    for file in (cache / f"{key}.tmp-1").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])
    assert documents_of(open_texts()) == texts_of(texts)
    assert sorted(path.name for path in cache.iterdir()) == [key, f"{key}.lock"]


def test_the_second_process_waits_and_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    waiting = threading.Event()
    results = []

    def second() -> None:
        results.append(build_once(folder, lambda temporary: pytest.fail("built twice"), report=lambda _: waiting.set()))

    lock = FileLock(tmp_path / "key.lock")
    with lock:
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        folder.mkdir()
    thread.join(30)
    assert results == [False]


def test_a_process_may_have_nothing_to_do(open_jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lctrain.data.sources.SHARD_BYTES", 30)
    assert documents_of(open_jsonl([{"text": "one"}, *[""] * 100], num_proc=2)) == [b"one"]
    assert documents_of(open_jsonl([*[""] * 100, {"text": "one"}], num_proc=2)) == [b"one"]


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(temporary: Path) -> None:
        (temporary / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "key", build, report=print)
    assert not list(tmp_path.glob("key.tmp*"))
    assert build_once(tmp_path / "key", lambda temporary: None, report=print)


KILLED = """
import json, os, signal, sys
from lctrain.config.data import TextConfig
from lctrain.data import tokenise
from lctrain.data.prepare import prepare

def stuck(content, tokenizer):
    os.write(1, b"tokenising\\n")
    signal.pause()

tokenise._encode = stuck
prepare(TextConfig(**json.loads(sys.argv[1])), model_path=None, vocab_size=None, split="train")
"""


def test_a_killed_preparation_does_not_block_the_next(open_texts, texts: Path, tmp_path: Path) -> None:
    settings = {"path": str(texts), "cache_dir": str(tmp_path / "cache"), "tokenizer": "byte", "num_proc": 2}
    command = [sys.executable, "-c", KILLED, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as killed:
        try:
            assert killed.stdout.readline() == b"tokenising\n"
            killed.kill()
            killed.wait()
            assert list((tmp_path / "cache").glob("*.tmp-*"))
            # Its worker processes live on; they must hold neither the lock nor a place in the cache.
            assert documents_of(open_texts()) == texts_of(texts)
            assert not list((tmp_path / "cache").glob("*.tmp-*"))
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
