"""The stage verb: what it prints and leaves, a copy that is killed and goes on, and wrong input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lctrain.data.images.store import ImageStore
from tests.support.command import LIMIT_S, environment, lctrain
from tests.support.object_store import KEYS, ObjectStore
from tests.unit.data.small_images import picture, write_folder

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
# The command line with shards of three small images; whoever runs tests in the background lets Ctrl-C be ignored.
SMALL_SHARDS = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from lctrain.cli import main; from lctrain.data.images import copying; "
    "copying.SHARD_BYTES = 4000; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = ObjectStore()
    yield server
    server.close()


def staged(out: str) -> list[ImageStore]:
    return [ImageStore(Path(line.removeprefix("staged: "))) for line in out.splitlines() if line.startswith("staged: ")]


def test_a_folder_is_staged_once_and_mended(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "pictures" / "train", {"cat": 3, "dog": 2})
    write_folder(tmp_path / "pictures" / "val", {"cat": 1, "dog": 1}, seed=9)
    words = ["stage", "data.source=pictures", "data.cache=cache"]
    first = lctrain(*words, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert "(train): 5 images of 2 classes" in first.stdout
    assert "read amplification 1.00" in first.stdout
    second = lctrain(*words, cwd=tmp_path)
    assert second.returncode == 0
    assert second.stdout.count("already staged, 0 bytes read from the source") == 2
    train = next((tmp_path / "cache").glob("pictures-train-*/images-00000.arrow"))
    train.write_bytes(train.read_bytes()[:-1])
    third = lctrain(*words, cwd=tmp_path)
    assert third.returncode == 0
    assert "damaged shards, copied again: 1" in third.stdout
    folders = [line.removeprefix("staged: ") for line in third.stdout.splitlines()[-2:]]
    found = [ImageStore(tmp_path / folder) for folder in folders]
    assert [bytes(found[0].image(i)) for i in range(5)] == list(files.values())
    assert len(found[1]) == 2


def test_a_recipe_names_the_data(tmp_path: Path) -> None:
    write_folder(tmp_path / "pictures", {"cat": 1})
    words = ["recipe=lenet_fashion_mnist", "data.source=pictures", "data.cache=cache"]
    done = lctrain("stage", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "data.eval_source gives one" in done.stdout
    assert len(list((tmp_path / "cache").glob("pictures-train-*/manifest.json"))) == 1


def test_a_killed_stage_goes_on_where_it_was(store: ObjectStore, tmp_path: Path) -> None:
    images = {f"{'ab'[n % 2]}/{n:03d}.jpg": picture(n) for n in range(150)}
    store.put(images, "set")
    words = [
        "stage",
        f"data.source=s3://{store.bucket}/set",
        f"data.endpoint_url={store.url}",
        f"data.cache={tmp_path / 'c'}",
    ]
    store.hold_after = 90
    killed = _start(words, tmp_path)
    kept = _wait_for_shards(killed, tmp_path / "c", 5)
    killed.kill()
    killed.communicate(timeout=LIMIT_S)
    assert not list((tmp_path / "c").glob("*/manifest.json"))
    store.hold_after = None
    store.release.set()
    store.served.clear()
    again = _start(words, tmp_path)
    out, err = again.communicate(timeout=LIMIT_S)
    assert (again.returncode, err) == (0, "")
    assert "going on; whole shards kept: " in out
    found = staged(out)[0]
    names = sorted(images)
    assert [bytes(found.image(i)) for i in range(len(found))] == [images[name] for name in names]
    rows = sum(json.loads(record)["rows"] for record in kept)
    assert rows >= 15
    assert not {f"set/{name}" for name in names[:rows]} & set(store.served)
    # What was read ahead when it was killed was read again, and counts.
    assert found.manifest.source_bytes <= found.manifest.remote_bytes <= store.body_bytes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)], ids=str)
def test_a_stage_that_waits_for_its_source_ends_at_once(
    store: ObjectStore, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = _start(_held_stage(store, tmp_path), tmp_path)
    assert store.held.wait(LIMIT_S)
    process.send_signal(number)
    assert process.wait(LIMIT_S) == code
    _, err = process.communicate()
    assert err == ("interrupted; the same command goes on where this one stopped\n" if code == 130 else "")


def test_training_that_still_stages_ends_at_once(store: ObjectStore, tmp_path: Path) -> None:
    _, *words = _held_stage(store, tmp_path)
    process = _start(["recipe=lenet_fashion_mnist", *words, "run_dir=run"], tmp_path)
    assert store.held.wait(LIMIT_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 75
    _, err = process.communicate()
    assert err == "stopped before the first step; the same command starts it again\n"
    assert not (tmp_path / "run").exists()


def _held_stage(store: ObjectStore, folder: Path) -> list[str]:
    """The words of a stage whose store stops answering after some images; a read waits for it longer than a test."""
    store.put({f"{'ab'[n % 2]}/{n:03d}.jpg": picture(n) for n in range(40)}, "set")
    store.hold_after = 20
    source = [f"data.source=s3://{store.bucket}/set", f"data.endpoint_url={store.url}", f"data.timeout_s={2 * LIMIT_S}"]
    return ["stage", *source, f"data.cache={folder / 'c'}"]


def _start(words: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_SHARDS, *words],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_shards(process: subprocess.Popen[Any], cache: Path, count: int) -> list[str]:
    """The records of the first `count` shards; the process is not waited for by sleeping, but by its end."""
    for _ in range(int(LIMIT_S / 0.02)):
        records = sorted(cache.glob("*.partial/images-*.arrow.json"))
        if len(records) >= count:
            return [path.read_text() for path in records[:count]]
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"ended early with {process.returncode}: {process.communicate()}")
    process.kill()
    raise AssertionError(f"no {count} shards in {LIMIT_S} s: {process.communicate()}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "data.source is not set; give it a folder"),
        (["data.cache=cache", "data.source=gone/"], "data.source=gone/ does not exist"),
        (
            ["data.cache=cache", "data.source=pictures", "seed=3"],
            "seed=3 is no field of the images; stage takes data.FIELD=VALUE",
        ),
        (
            ["data.cache=cache", "data.source=pictures", "data.retry=3"],
            "data.retry is not a field of this configuration",
        ),
        (["data.cache=cache", "data.source=pictures", "data.retries=0"], "data.retries=0 must be positive"),
        (["data.cache=cache", "data.source=pictures", "data.format=zip"], "data.format=zip"),
        (["data.cache=cache", "data.source=pictures", "data.format=tar"], "has no .tar"),
        (
            ["data.cache=cache", "data.source=pictures"],
            "val has no images of class dog, which the training images have",
        ),
        (["data.cache=cache", "data.source=pictures/empty"], "is no layout that data.format=auto knows"),
        (["recipe=llama_tiny_32k"], "is text; stage copies images"),
        (
            ["data.cache=cache", "data.source=s3://b/x", "data.endpoint_url=http://127.0.0.1:1", "data.retries=1"],
            "failed 2 times",
        ),
    ],
)
def test_wrong_input_ends_with_2_and_one_message(
    tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    write_folder(tmp_path / "pictures" / "train", {"cat": 1, "dog": 1})
    write_folder(tmp_path / "pictures" / "val", {"cat": 1})
    (tmp_path / "pictures" / "empty").mkdir()
    done = lctrain("stage", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="apt-get install dataset-fashion-mnist")
def test_fashion_mnist(tmp_path: Path) -> None:
    done = lctrain("stage", f"data.source={FASHION_MNIST}", f"data.cache={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train, held = staged(done.stdout)
    assert (len(train), len(held), train.manifest.raw_shape) == (60_000, 10_000, (28, 28, 1))
    assert train.manifest.classes[train.label(0)] == held.manifest.classes[held.label(0)] == "Ankle boot"
