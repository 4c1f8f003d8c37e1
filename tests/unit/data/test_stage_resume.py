"""Staging that is interrupted, or whose shards were damaged later: what is kept, copied again, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lctrain.data.images import stage
from lctrain.data.images.prepare import open_images
from lctrain.errors import DataError
from tests.unit.data.small_images import picture, write_folder, write_tar
from tests.unit.data.staging import Stopped, config, content, fill_shards_early, staged, stop_after


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """See fill_shards_early."""
    fill_shards_early(monkeypatch)


def _stop_at_folder(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    def stopping(path: Path, target: Path) -> Path:
        if path.is_dir():
            raise Stopped
        return rename(path, target)

    return stopping


def test_an_interrupted_copy_goes_on(tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_folder(tmp_path / "source", {"a": 5, "b": 5})
    straight = staged(config(tmp_path, cache=str(tmp_path / "straight")))
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(Stopped):
            staged(config(tmp_path))
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    with monkeypatch.context() as patch:
        read, said = stop_after(patch, 99), []
        store = staged(config(tmp_path), report=said.append)
    assert read == list(files)[6:]
    assert "going on; whole shards kept: 2" in said[1]
    assert content(store) == content(straight)
    assert store.fingerprint == straight.fingerprint
    assert [s["sha256"] for s in store.manifest.shards] == [s["sha256"] for s in straight.manifest.shards]
    # What was read for the shard that was not finished counts too.
    assert 1 <= store.manifest.read_amplification < 1.4


def test_an_end_between_manifest_and_rename_loses_nothing(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "source", {"a": 5, "b": 5})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _stop_at_folder(Path.rename))
        with pytest.raises(Stopped):
            staged(config(tmp_path))
    assert list((tmp_path / "cache").glob("*.partial/manifest.json"))
    with monkeypatch.context() as patch:
        read = stop_after(patch, 99)
        store = staged(config(tmp_path))
    assert read == []
    assert content(store) == content(staged(config(tmp_path, cache=str(tmp_path / "straight"))))
    assert sorted(p.suffix for p in store.folder.iterdir()) == [".arrow"] * 4 + [".json"]


def test_a_damaged_shard_of_an_interrupted_copy_is_copied_again(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_folder(tmp_path / "source", {"a": 10})
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(Stopped):
            staged(config(tmp_path))
    shard = next((tmp_path / "cache").glob("*.partial")) / "images-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")  # as long as it was
    with monkeypatch.context() as patch:
        read = stop_after(patch, 99)
        store = staged(config(tmp_path))
    names = list(files)
    assert read == names[:3] + names[9:]
    assert [data for _, _, data in content(store)] == list(files.values())


def test_a_source_that_changed_during_the_break_is_begun_again(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "source", {"a": 8})
    source = tmp_path / "source.tar"
    write_tar(source, [(f"a/{n}.jpg", picture(n)) for n in range(8)])
    cfg = config(tmp_path, source=str(source))
    # The same key for other content, as a remote source has it.
    monkeypatch.setattr("lctrain.data.images.location.Location.signature", lambda self: [])
    with monkeypatch.context() as patch:
        patch.setattr("lctrain.data.images.copying.checked", _raise_at(picture(7)))
        with pytest.raises(Stopped):
            staged(cfg)
    write_tar(source, [(f"a/{n}.jpg", picture(n)) for n in range(20, 29)])
    said: list[str] = []
    store = staged(cfg, report=said.append)
    assert any("is not what it was when" in line for line in said)
    assert [data for _, _, data in content(store)] == [picture(n) for n in range(20, 29)]


def _raise_at(image: bytes) -> object:
    def checked(data: bytes, **_: object) -> bytes:
        if data == image:
            raise Stopped
        return data

    return checked


def test_a_truncated_shard_names_its_checksum_and_is_mended(tmp_path: Path, small_shards: None) -> None:
    write_folder(tmp_path / "source", {"a": 7})
    cfg = config(tmp_path)
    store = staged(cfg)
    before, shard = content(store), store.manifest.shards[1]
    path = store.folder / shard["name"]
    path.write_bytes(path.read_bytes()[:-5])
    for opened in (lambda: staged(cfg), lambda: open_images(cfg, key=store.key, split="train")):
        with pytest.raises(
            DataError, match=rf"images-00001\.arrow has .* bytes but .* written \(sha256 {shard['sha256']}\)"
        ):
            opened()
    said: list[str] = []
    mended = staged(cfg, verify=True, report=said.append)
    assert said[0].startswith("stage: data.source=")
    assert content(mended) == before
    assert mended.fingerprint == store.fingerprint
    assert mended.remote_bytes == sum(len(data) for _, _, data in before[3:6])
    path.write_bytes(b"\1" + path.read_bytes()[1:])  # as long as it was: only the checksum tells
    assert content(staged(cfg, verify=True)) == before
    assert path.read_bytes()[:1] == b"A"


def test_a_source_that_lost_the_images_mends_nothing(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_folder(tmp_path / "source", {"a": 7})
    monkeypatch.setattr("lctrain.data.images.location.Location.signature", lambda self: [])
    store = staged(config(tmp_path))
    (store.folder / "images-00001.arrow").unlink()
    (tmp_path / "source" / list(files)[4]).write_bytes(picture(77))
    with pytest.raises(DataError, match=r"does not hold the images of .*images-00001\.arrow any more; remove"):
        staged(config(tmp_path), verify=True)
    assert not (store.folder / "images-00001.arrow").exists()


def test_class_names_found_while_reading_are_sorted(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["z", "m", "a", "z", "m", "k", "a"]
    write_tar(tmp_path / "source" / "train-0.tar", [(f"{c}/{n}.jpg", picture(n)) for n, c in enumerate(names)])
    write_tar(tmp_path / "source" / "val-0.tar", [("m/0.jpg", picture(7))])
    plain, calls = stage.relabel, []

    def stopped(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise Stopped
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "relabel", stopped)
    with pytest.raises(Stopped):
        staged(config(tmp_path))
    first = next((tmp_path / "cache").glob("*.partial")) / "images-00000.arrow"
    first.unlink()  # it has its final labels already: they must come back
    store = staged(config(tmp_path))
    assert store.manifest.classes == ["a", "k", "m", "z"]
    assert [(label, data) for _, label, data in content(store)] == [
        ("akmz".index(c), picture(n)) for n, c in enumerate(names)
    ]
    (store.folder / "images-00000.arrow").unlink()
    assert content(staged(config(tmp_path), verify=True)) == content(store)
    assert content(staged(config(tmp_path), "eval"))[0][1] == 2
