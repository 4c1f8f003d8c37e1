"""Staging from an object store: a real S3-protocol server on loopback, and a store that fails in every way."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lctrain.config.images import ImagesConfig
from lctrain.data.images import remote
from lctrain.data.images.prepare import prepare_images
from lctrain.data.images.remote import RemoteStorage
from lctrain.data.images.storage import Entry
from lctrain.data.images.store import ImageStore
from lctrain.errors import ConfigError, DataError
from tests.support.object_store import KEYS, ObjectStore
from tests.unit.data.small_images import picture, write_folder, write_parquet, write_tar

fsspec = pytest.importorskip("fsspec")


def config(cache: Path, **fields: Any) -> ImagesConfig:
    return ImagesConfig(**({"cache": str(cache), "image_size": 16, "retries": 2} | fields))


def staged(cfg: ImagesConfig, split: str = "train") -> ImageStore:
    found = prepare_images(cfg, split=split, report=lambda _: None)  # type: ignore[arg-type]
    assert found is not None
    return found


def pictures(store: ImageStore) -> list[tuple[int, bytes]]:
    return [(store.label(i), bytes(store.image(i))) for i in range(len(store))]


# -- S3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    root = tmp_path_factory.mktemp("pictures")
    write_folder(root / "train", {"a": 3, "b": 2})
    write_folder(root / "val", {"a": 1, "b": 1}, seed=40)
    write_tar(root / "tar" / "0.tar", [(f"{'ba'[n % 2]}/{n}.jpg", picture(n)) for n in range(4)])
    write_parquet(root / "tables" / "0.parquet", [picture(n) for n in range(4)], ["a", "b"] * 2, row_group_size=2)
    server = ObjectStore()
    server.put({p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}, "set")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def waits(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Credentials in the environment, a store that behaves, and no real waiting; how long it would have been."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    store.cut.clear()
    store.status.clear()
    store.served.clear()
    store.body_bytes = 0
    waited: list[float] = []
    monkeypatch.setattr(RemoteStorage.__init__, "__kwdefaults__", {"sleep": waited.append})
    return waited


def test_a_bucket_is_read_once(store: ObjectStore, tmp_path: Path) -> None:
    cfg = config(tmp_path, source=f"s3://{store.bucket}/set", endpoint_url=store.url)
    train, held = staged(cfg), staged(cfg, "eval")
    assert pictures(train) == [(int(n > 3), picture(n)) for n in range(1, 6)]
    assert pictures(held) == [(0, picture(41)), (1, picture(42))]
    assert set(store.served.values()) == {1}
    assert train.manifest.remote_bytes + held.manifest.remote_bytes == store.body_bytes
    assert train.manifest.read_amplification == 1.0
    store.served.clear()
    again = staged(cfg)
    assert (again.remote_bytes, again.fingerprint, len(store.served)) == (0, train.fingerprint, 0)
    assert staged(cfg, "eval").remote_bytes == 0


def test_what_is_staged_needs_no_store(tmp_path: Path, store: ObjectStore) -> None:
    root = tmp_path / "pictures"
    write_folder(root, {"a": 2})
    other = ObjectStore()
    try:
        other.put({f"a/{p.name}": p.read_bytes() for p in (root / "a").iterdir()}, "other")
        cfg = config(tmp_path / "cache", source=f"s3://{other.bucket}/other", endpoint_url=other.url)
        first = staged(cfg)
        assert prepare_images(cfg, split="eval", report=lambda _: None) is None
    finally:
        other.close()
    assert pictures(staged(cfg)) == pictures(first)
    assert prepare_images(cfg, split="eval", report=lambda _: None) is None
    with pytest.raises(DataError, match=r"looking it up failed 3 times, at last with .*check the address"):
        staged(config(tmp_path / "another", source=f"s3://{other.bucket}/set", endpoint_url=other.url))


@pytest.mark.parametrize(("path", "amplification"), [("tar/0.tar", 1.0), ("tables", 1.2)])
def test_archives_and_tables_of_a_bucket(store: ObjectStore, tmp_path: Path, path: str, amplification: float) -> None:
    found = staged(config(tmp_path, source=f"s3://{store.bucket}/set/{path}", endpoint_url=store.url))
    order = [1, 0, 1, 0] if "tar" in path else [0, 1, 0, 1]
    assert pictures(found) == [(order[n], picture(n)) for n in range(4)]
    assert 0.9 < found.manifest.read_amplification <= amplification
    assert store.body_bytes == found.manifest.remote_bytes


def test_half_a_file_is_read_again(store: ObjectStore, tmp_path: Path, waits: list[float]) -> None:
    store.cut["set/train/a/001.jpg"] = 2
    found = staged(config(tmp_path, source=f"s3://{store.bucket}/set/train", endpoint_url=store.url))
    assert pictures(found)[1] == (0, picture(2))
    assert (store.served["set/train/a/001.jpg"], waits) == (3, [0.5, 1.0])
    assert found.manifest.remote_bytes == store.body_bytes > found.manifest.source_bytes


def test_half_a_file_every_time_is_an_error(store: ObjectStore, tmp_path: Path, waits: list[float]) -> None:
    store.cut["set/train/b/003.jpg"] = 0
    store.cut["set/train/a/001.jpg"] = 99
    cfg = config(tmp_path, source=f"s3://{store.bucket}/set/train", endpoint_url=store.url)
    size = len(picture(2))
    said = rf"reading a/001\.jpg failed 3 times, .* {size // 2:,} of {size:,} bytes came; .*goes on where this one"
    with pytest.raises(DataError, match=said):
        staged(cfg)
    store.cut.clear()
    assert len(staged(cfg)) == 5


def test_a_server_that_is_busy(store: ObjectStore, tmp_path: Path, waits: list[float]) -> None:
    store.status["set/train/a/000.jpg"] = 503
    with pytest.raises(DataError, match=r"reading a/000\.jpg failed 3 times"):
        staged(config(tmp_path, source=f"s3://{store.bucket}/set/train", endpoint_url=store.url))
    assert waits == [0.5, 1.0]
    assert store.served["set/train/a/000.jpg"] == 3  # and no retries below ours


def test_a_server_that_does_not_answer(store: ObjectStore, tmp_path: Path, waits: list[float]) -> None:
    store.hold_after = 0
    cfg = config(tmp_path, source=f"s3://{store.bucket}/set/train", endpoint_url=store.url, timeout_s=0.2, retries=1)
    try:
        with pytest.raises(DataError, match=r"reading .* failed 2 times, at last with .*[Tt]ime"):
            staged(cfg)
    finally:
        store.hold_after = None
        store.release.set()
    assert waits
    store.release.clear()


def test_refusals_are_not_repeated(
    store: ObjectStore, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, said in (("nothing", r"correct the URL"), ("set/train/a/000.jpg", "is no layout")):
        with pytest.raises(DataError, match=said):
            staged(config(tmp_path, source=f"s3://{store.bucket}/{where}", endpoint_url=store.url))
    store.status["set/train/a/000.jpg"] = 403
    with pytest.raises(DataError, match="give credentials that may read it, in the environment") as caught:
        staged(config(tmp_path, source=f"s3://{store.bucket}/set/train", endpoint_url=store.url))
    assert not any(secret in str(caught.value) for secret in KEYS.values() if secret != KEYS["AWS_DEFAULT_REGION"])
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID"):
        staged(config(tmp_path, source=f"s3://{store.bucket}/set/val", endpoint_url=store.url))
    assert waits == []


def test_only_s3_has_an_endpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.endpoint_url=http://x has no effect on data\.source=memory://y"):
        staged(config(tmp_path, source="memory://y", endpoint_url="http://x"))
    with pytest.raises(ConfigError, match=r"data\.source=nosuch://host/y is no URL that can be read"):
        staged(config(tmp_path, source="nosuch://me:secret@host/y"))


# -- any file system


class Failing:
    """An fsspec file system in memory; `answers` are given, or raised, before it answers by itself."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.plain = fsspec.filesystem("memory", skip_instance_cache=True)
        self.plain.store = {f"/top/{name}": self._file(name, data) for name, data in files.items()}
        self.answers: list[Any] = []
        self.async_impl = False

    def _file(self, name: str, data: bytes) -> Any:
        from fsspec.implementations.memory import MemoryFile

        return MemoryFile(self.plain, f"/top/{name}", data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def cat_file(self, path: str, **part: Any) -> bytes:
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return self.plain.cat_file(path, **part)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    made = Failing({"a/1.jpg": picture(1), "a/.hidden": b"", "b/2.jpg": picture(2)})
    monkeypatch.setattr(remote, "_filesystem", lambda title, url, cfg: (made, "/top"))
    return made


def test_waits_grow_and_end(failing: Failing, waits: list[float]) -> None:
    storage = RemoteStorage("data.source=x://top", "x://top", cfg=ImagesConfig(retries=8), sleep=waits.append)
    entry = storage.walk()[0]
    failing.answers = [OSError("busy")] * 8
    assert storage.read(entry) == picture(1)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    failing.answers = [OSError("http://me:secret@host busy")] * 9
    with pytest.raises(DataError, match=r"data\.source=x://top: reading a/1\.jpg failed 9 times.*http://host busy"):
        storage.read(entry)


def test_an_answer_that_is_too_long_is_no_answer(failing: Failing, waits: list[float]) -> None:
    storage = RemoteStorage("t", "x://top", cfg=ImagesConfig(retries=1), sleep=waits.append)
    failing.answers = [b"x" * 10]
    assert storage.read(storage.walk()[0], 2, 5) == picture(1)[2:5]
    assert storage.counter.total == 13


def test_a_failing_read_inside_a_reader_keeps_its_message(failing: Failing, tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", [picture(1)], [0])
    write_tar(tmp_path / "x.tar.gz", [("a/1.jpg", picture(1))])
    for name in ("x.parquet", "x.tar.gz"):
        failing.plain.store = {f"/top/{name}": failing._file(name, (tmp_path / name).read_bytes())}
        failing.answers = [OSError("busy")] * 3
        with pytest.raises(DataError, match=rf"reading {name} failed 3 times, at last with OSError: busy"):
            staged(config(tmp_path / "cache", source="x://top"))


def test_remote_listings(failing: Failing) -> None:
    storage = RemoteStorage("t", "x://top", cfg=ImagesConfig())
    assert storage.children() == (["a", "b"], [])
    assert [(e.path, e.size) for e in storage.walk()] == [("a/1.jpg", len(picture(1))), ("b/2.jpg", len(picture(2)))]
    below = storage.below("a")
    assert (below.children(), [e.path for e in below.walk()]) == (([], ["1.jpg"]), ["1.jpg"])


def test_a_file_in_ranges(failing: Failing) -> None:
    storage = RemoteStorage("t", "x://top", cfg=ImagesConfig())
    entry, whole = storage.walk()[0], picture(1)
    file = storage.open(entry, block=100)
    assert (file.read(10), file.read(50), storage.counter.total) == (whole[:10], whole[10:60], 100)
    assert (file.read(200), file.tell(), storage.counter.total) == (whole[60:260], 260, 260)
    file.seek(-5, 2)
    assert (file.read(), file.read(1), file.read(0)) == (whole[-5:], b"", b"")
    file.seek(0)
    assert file.read() == whole


def test_tar_files_are_read_in_blocks(failing: Failing, tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [(f"a/{n}.jpg", picture(n)) for n in range(9)])
    content = (tmp_path / "x.tar").read_bytes()
    failing.plain.store["/top/x.tar"] = failing._file("x.tar", content)
    storage = RemoteStorage("t", "x://top", cfg=ImagesConfig())
    entry = Entry("x.tar", len(content), "")
    with tarfile.open(fileobj=storage.open(entry, block=4096), mode="r:") as archive:  # type: ignore[arg-type]
        assert [archive.extractfile(m).read() for m in archive] == [picture(n) for n in range(9)]  # type: ignore[union-attr]
    assert storage.counter.total <= 1.3 * len(content)
