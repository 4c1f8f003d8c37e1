from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lctrain.config.data import HubConfig, JsonlConfig, ParquetConfig, TextConfig
from lctrain.data import hub, sources
from lctrain.data.records import BadRecord
from lctrain.data.sources import Source, open_source
from lctrain.errors import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def everything(source: Source) -> dict[str, object]:
    """place -> content, or the message of a bad record."""
    found = {}
    for shard in source.shards:
        for index, content in source.read(shard):
            found[source.place(shard, index)] = str(content) if isinstance(content, BadRecord) else content
    return found


def write_lines(path: Path, lines: list) -> None:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")


def test_text_folder_is_sorted_and_filtered(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"B\r\n",
        "a/z.md": "\ufeffé".encode(),
        "a/.git/x.txt": b"no",
        "c.bin": b"\xff",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = open_source(TextConfig(), path=str(tmp_path))
    assert list(everything(source).items()) == [("a/z.md", "é"), ("b.txt", "B\r\n")]
    assert source.full_place("a/z.md") == str(tmp_path / "a/z.md")
    every = open_source(TextConfig(extensions=[]), path=str(tmp_path))
    assert list(everything(every)) == ["a/z.md", "b.txt", "c.bin"]
    assert "not UTF-8 (byte 0" in everything(every)["c.bin"]
    one = open_source(TextConfig(), path=str(tmp_path / "b.txt"))
    assert everything(one) == {"b.txt": "B\r\n"}


@pytest.mark.parametrize("content", ["", " \n\t", "\ufeff"])
def test_an_empty_text_file_is_a_bad_record(tmp_path: Path, content: str) -> None:
    (tmp_path / "__init__.py").write_text(content, encoding="utf-8")
    assert "no tokens" in everything(open_source(TextConfig(), path=str(tmp_path)))["__init__.py"]


def test_digest_sees_paths_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"

    def digest() -> str:
        return open_source(TextConfig(), path=str(tmp_path)).digest()

    file.write_text("one")
    first = digest()
    file.write_text("two")
    assert digest() != first
    file.write_text("one")
    assert digest() == first
    file.rename(tmp_path / "b.txt")
    assert digest() != first


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path is not set"):
        open_source(TextConfig(), path=None)
    with pytest.raises(DataError, match=r"data\.eval_path=.*gone does not exist"):
        open_source(JsonlConfig(), field="data.eval_path", path=str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"data\.path=.*\.txt, \.md, \.rst, \.py.*data\.extensions"):
        open_source(TextConfig(), path=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.path=.*ends in \.jsonl"):
        open_source(JsonlConfig(), path=str(tmp_path))
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"data\.path=.*no documents"):
        open_source(JsonlConfig(), path=str(tmp_path))


BAD_LINES = {
    2: ('{"text": "cut', "does not parse as JSON"),
    3: ({"body": "x"}, "fields: body"),
    4: ({"text": ""}, "no tokens"),
    5: ({"text": 7}, "must be text, not int"),
    6: ([1, 2], "not list"),
    7: ('{"text": "\\ud800"}', "surrogate"),
    8: ({"messages": [{"role": "user"}]}, "message 1"),
    9: ({"messages": []}, "not empty"),
    10: ({"messages": [{"role": "user", "content": "hi"}]}, "no message of role `assistant`"),
}


def test_jsonl_names_bad_lines(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.jsonl", [{"text": "good"}, *(line for line, _ in BAD_LINES.values()), "", {"messages": CHAT}]
    )
    found = everything(open_source(JsonlConfig(), path=str(tmp_path)))
    assert found.pop("a.jsonl:1") == "good"
    assert found.pop("a.jsonl:12") == CHAT
    assert set(found) == {f"a.jsonl:{line}" for line in BAD_LINES}
    for line, (_, reason) in BAD_LINES.items():
        assert reason in found[f"a.jsonl:{line}"]


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
def test_jsonl_shards_cut_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sources, "SHARD_BYTES", size)
    lines = ["é" * n + "x" for n in (1, 30, 2, 2, 11)]
    write_lines(tmp_path / "a.jsonl", [json.dumps({"text": line}, ensure_ascii=False) for line in lines])
    source = open_source(JsonlConfig(), path=str(tmp_path / "a.jsonl"))
    assert len(source.shards) == -(-(tmp_path / "a.jsonl").stat().st_size // size)
    assert list(everything(source).items()) == [(f"a.jsonl:{n}", line) for n, line in enumerate(lines, 1)]


def test_field_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"body": "b"}, {"talk": CHAT, "body": "ignored beside a conversation"}])
    cfg = JsonlConfig(text_field="body", messages_field="talk")
    assert list(everything(open_source(cfg, path=str(tmp_path))).values()) == ["b", CHAT]


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", None, "c", "d", "e"], "messages": [None, None, None, CHAT, None], "n": range(5)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    source = open_source(ParquetConfig(), path=str(tmp_path))
    assert len(source.shards) == 3
    found = everything(source)
    assert "neither" in found.pop("a.parquet:2")
    assert list(found.items()) == [
        ("a.parquet:1", "a"), ("a.parquet:3", "c"), ("a.parquet:4", CHAT), ("a.parquet:5", "e")
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"a\.parquet has neither column.*columns: text, messages, n"):
        open_source(ParquetConfig(text_field="x", messages_field="y"), path=str(tmp_path))
    (tmp_path / "b.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"b\.parquet is not a parquet file"):
        open_source(ParquetConfig(), path=str(tmp_path))


def test_hub_reads_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(hub, "SHARD_ROWS", 2)
    rows = datasets.Dataset.from_dict({"text": ["a", "b", ""], "other": [1, 2, 3]})
    rows.to_parquet(tmp_path / "plain" / "train.parquet")
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    rows.save_to_disk(str(tmp_path / "one"))
    digests = set()
    for name in ("plain", "saved", "one"):
        source = open_source(HubConfig(), path=str(tmp_path / name))
        found = everything(source)
        assert "empty" in found.pop(f"{tmp_path / name}[train]:3")
        assert list(found.values()) == ["a", "b"]
        digests.add(source.digest())
    assert len(digests) == 1
    assert open_source(HubConfig(text_field="other"), path=str(tmp_path / "saved")).digest() not in digests
    with pytest.raises(DataError, match=r"data\.split=gone"):
        open_source(HubConfig(split="gone"), path=str(tmp_path / "saved"))
    with pytest.raises(DataError, match="has neither column"):
        open_source(HubConfig(text_field="body"), path=str(tmp_path / "one"))


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"data\.path=some/name.*no route.*HF_HOME"):
        open_source(HubConfig(), path="some/name")
