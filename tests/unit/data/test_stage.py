"""Staging local sources: what is written, what is left out, what is continued, mended or refused."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from PIL import Image

from lctrain.data.images import progress
from lctrain.data.images.prepare import open_images, prepare_images
from lctrain.data.images.storage import LocalStorage
from lctrain.errors import ConfigError, DataError
from tests.unit.data.small_images import picture, write_folder, write_idx, write_tar
from tests.unit.data.staging import config, content, fill_shards_early, staged, stop_after


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """See fill_shards_early."""
    fill_shards_early(monkeypatch)


def test_images_are_kept_byte_for_byte(tmp_path: Path, small_shards: None) -> None:
    files = write_folder(tmp_path / "source" / "train", {"a": 4, "b": 3})
    write_folder(tmp_path / "source" / "val", {"a": 1, "b": 1}, seed=50)
    cfg = config(tmp_path)
    store = staged(cfg)
    assert content(store) == [(name, int(name[0] == "b"), data) for name, data in files.items()]
    manifest = store.manifest
    assert (manifest.classes, manifest.channels, manifest.raw_shape, manifest.skipped) == (["a", "b"], 3, None, 0)
    assert manifest.remote_bytes == manifest.source_bytes == store.remote_bytes == sum(map(len, files.values()))
    assert [shard["rows"] for shard in manifest.shards] == [3, 3, 1]
    for shard in manifest.shards:
        written = (store.folder / shard["name"]).read_bytes()
        assert (len(written), hashlib.sha256(written).hexdigest()) == (shard["bytes"], shard["sha256"])
    assert sorted(p.name for p in store.folder.iterdir()) == [*(s["name"] for s in manifest.shards), "manifest.json"]
    assert [label for _, label, _ in content(staged(cfg, "eval"))] == [0, 1]


def test_a_second_time_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "source", {"a": 2})
    first = staged(config(tmp_path))
    read, said = stop_after(monkeypatch, 0), []
    second = staged(config(tmp_path), report=said.append)
    assert (read, second.remote_bytes, second.fingerprint) == ([], 0, first.fingerprint)
    assert "already staged, 0 bytes read from the source" in said[0]
    assert prepare_images(config(tmp_path), split="eval") is None
    assert content(open_images(config(tmp_path), key=first.key, split="train")) == content(first)
    assert content(pickle.loads(pickle.dumps(second))) == content(first)


def test_pixels_of_idx_files(tmp_path: Path) -> None:
    pixels = write_idx(tmp_path / "source", "train", [3, 0, 1])
    write_idx(tmp_path / "source", "t10k", [2])
    store = staged(config(tmp_path))
    assert (store.manifest.raw_shape, store.manifest.channels) == ((5, 4, 1), 1)
    assert store.manifest.classes == ["0", "1", "2", "3"]
    assert [bytes(store.image(i)) for i in range(3)] == [p.tobytes() for p in pixels]
    assert staged(config(tmp_path), "eval").manifest.classes == ["0", "1", "2", "3"]
    with pytest.raises(DataError, match=r"data\.resize_short=20 does not apply .* idx files hold pixels"):
        staged(config(tmp_path, resize_short=20))


def test_labels_outside_the_classes(tmp_path: Path) -> None:
    write_idx(tmp_path / "source", "train", [0, 2, 1])
    (tmp_path / "source" / "classes.txt").write_text("cat\ndog")
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte:1 .* has label 2, outside its classes \(2: cat, dog\)"
    ):
        staged(config(tmp_path))
    (tmp_path / "source" / "classes.txt").unlink()
    write_idx(tmp_path / "source", "t10k", [0, 3])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte:1 .* has label 3, outside its classes \(3: 0, 1, 2\)"):
        staged(config(tmp_path), "eval")
    write_tar(tmp_path / "mixed.tar", [("a/0.jpg", picture(0)), ("1.jpg", picture(1)), ("1.cls", b"1")])
    with pytest.raises(DataError, match=r"mixed\.tar:1\.jpg .* has label 1, outside its classes \(names\)"):
        staged(config(tmp_path, source=str(tmp_path / "mixed.tar")))


def test_the_short_side_is_resized(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "a"
    folder.mkdir(parents=True)
    for name, data in (
        ("1.jpg", picture(1, size=(80, 41))), ("2.png", picture(2, size=(41, 90), kind="PNG")),
        ("3.jpg", picture(3, size=(60, 60), mode="CMYK")), ("4.jpg", picture(4, size=(20, 99))),
    ):  # fmt: skip
        (folder / name).write_bytes(data)
    store = staged(config(tmp_path, resize_short=20))
    images = [Image.open(io.BytesIO(store.image(i))) for i in range(4)]
    assert [(image.size, image.format, image.mode) for image in images] == [
        ((39, 20), "JPEG", "RGB"), ((20, 44), "JPEG", "RGB"), ((20, 20), "JPEG", "RGB"), ((20, 99), "JPEG", "RGB"),
    ]  # fmt: skip
    assert bytes(store.image(3)) == picture(4, size=(20, 99))  # small enough: its own bytes
    assert store.key != staged(config(tmp_path)).key


def test_resizing_averages(tmp_path: Path) -> None:
    """A checkerboard of single pixels becomes gray; without antialiasing it would be black, white or a pattern."""
    (tmp_path / "source" / "a").mkdir(parents=True)
    board = Image.new("L", (64, 64))
    board.putdata([255 * ((x + y) % 2) for y in range(64) for x in range(64)])
    board.save(tmp_path / "source" / "a" / "1.png")
    with Image.open(io.BytesIO(staged(config(tmp_path, resize_short=16)).image(0))) as small:
        low, high = small.convert("L").getextrema()
    assert 110 < low <= high < 145


def test_images_that_do_not_decode_are_counted_and_listed(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", {"a": 3})
    folder, whole = tmp_path / "source" / "a", picture(1)
    kept = {"cmyk.jpg": picture(5, mode="CMYK"), "p.png": picture(6, kind="PNG"), "p.gif": picture(7, kind="GIF")}
    bad = {"cut.jpg": whole[: len(whole) // 2], "empty.jpg": b"", "text.png": b"hello", "head.jpg": b"\0" + whole[1:]}
    for name, data in (kept | bad).items():
        (folder / name).write_bytes(data)
    said: list[str] = []
    store = staged(config(tmp_path), report=said.append)
    assert {name: data for name, _, data in content(store) if name.removeprefix("a/") in kept} == {
        f"a/{name}": data for name, data in kept.items()
    }
    assert len(store) == 6
    assert store.manifest.skipped == 4
    assert [place.split(": ")[0] for place in store.manifest.skipped_places] == [f"a/{n}" for n in sorted(bad)]
    counted = "left out, for they do not decode: 4 (listed in "
    assert said[-1].startswith(f"data: images of data.source={tmp_path / 'source'} (train) {counted}")
    assert said[-1].endswith("; ...")


def test_many_images_that_do_not_decode_are_listed_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, bad in (("train", 1), ("val", 3)):
        write_folder(tmp_path / "source" / part, {"a": 1})
        for number in range(bad):
            (tmp_path / "source" / part / "a" / f"bad{number}.jpg").write_bytes(b"no")
    for module in ("shards", "stage"):
        monkeypatch.setattr(f"lctrain.data.images.{module}.PLACES_KEPT", 2)
    said: list[str] = []
    store = staged(config(tmp_path), "eval", report=said.append)
    assert "(eval) left out, for they do not decode: 3 (the first 2 listed in " in said[-1]
    assert (store.manifest.skipped, len(store.manifest.skipped_places)) == (3, 2)


def test_validation_images_that_come_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store is not asked at every start: `stage` looks again, and what it finds is there for good."""
    monkeypatch.setattr("lctrain.data.images.location.Location.signature", lambda self: [])
    write_folder(tmp_path / "source" / "train", {"a": 2})
    cfg = config(tmp_path)
    assert prepare_images(cfg, split="eval") is None
    write_folder(tmp_path / "source" / "val", {"a": 1})
    assert prepare_images(cfg, split="eval") is None
    assert len(staged(cfg, "eval", verify=True)) == 1
    assert len(staged(cfg, "eval")) == 1
    assert not list((tmp_path / "cache").glob("*.none"))


def test_nothing_that_decodes_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "source" / "a").mkdir(parents=True)
    (tmp_path / "source" / "a" / "1.jpg").write_bytes(b"no")
    with pytest.raises(DataError, match=r"none of its images decodes \(1\), the first a/1\.jpg: "):
        staged(config(tmp_path))
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_changed_local_source_is_another(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "source", {"a": 2})
    first = staged(config(tmp_path))
    path = tmp_path / "source" / next(iter(files))
    path.write_bytes(picture(77))
    second = staged(config(tmp_path))
    assert (second.key != first.key, second.fingerprint != first.fingerprint) == (True, True)
    assert bytes(second.image(0)) == picture(77)


def test_many_files_are_signed_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, {"a": 2, "b": 2})
    monkeypatch.setattr("lctrain.data.images.storage.SIGNED_FILES", 3)
    before = LocalStorage("x", tmp_path).signature()
    assert len(before) == 3
    (tmp_path / "a" / "new.jpg").write_bytes(b"")
    assert LocalStorage("x", tmp_path).signature() != before


def test_one_process_writes(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", {"a": 2})
    key = staged(config(tmp_path, cache=str(tmp_path / "elsewhere"))).key
    (tmp_path / "cache").mkdir()
    waiting, stores = threading.Event(), []

    def report(line: str) -> None:
        if "another process is preparing" in line:
            waiting.set()

    with FileLock(tmp_path / "cache" / f"{key}.lock"):
        thread = threading.Thread(target=lambda: stores.append(staged(config(tmp_path), report=report)))
        thread.start()
        assert waiting.wait(30)
        assert not (tmp_path / "cache" / key).exists()
    thread.join(30)
    assert stores[0].key == key


def test_caches_that_cannot_be_used(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", {"a": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache=.*file cannot be used .*; give a folder with room"):
        staged(config(tmp_path, cache=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"data\.cache=.* lies inside data\.source="):
        staged(config(tmp_path, cache=str(tmp_path / "source" / "cache")))
    with pytest.raises(DataError, match="has no some-key with the eval images, which this node's first rank"):
        open_images(config(tmp_path), key="some-key", split="eval")
    store = staged(config(tmp_path))
    (store.folder / "manifest.json").write_text(json.dumps({"source": "x"}))
    with pytest.raises(DataError, match=r"manifest\.json cannot be read .*; remove .* and stage the images again"):
        staged(config(tmp_path))


def test_progress_is_lines_or_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "source", {"a": 3})
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    said: list[str] = []
    staged(config(tmp_path), report=said.append)
    assert any("KiB of " in line and "/s, " in line and line.endswith(" s left") for line in said)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    said.clear()
    staged(config(tmp_path, cache=str(tmp_path / "other")), report=said.append)
    assert not any("s left" in line for line in said)
    assert "stage data.source=" in terminal.getvalue()
