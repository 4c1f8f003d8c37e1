"""Sources of labelled images: every layout, its order, its classes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lctrain.config.images import ImageFormat, ImagesConfig
from lctrain.data.images.idx import FASHION_MNIST
from lctrain.data.images.layouts import open_images_source
from lctrain.data.images.location import locate
from lctrain.data.images.sources import START
from lctrain.errors import ConfigError, DataError
from tests.unit.data.opened_sources import rows, source, train
from tests.unit.data.small_images import picture, write_folder, write_idx, write_parquet, write_tar

# -- idx


@pytest.mark.parametrize("gz", [False, True])
def test_idx_files_keep_their_pixels_labels_and_order(tmp_path: Path, gz: bool) -> None:
    pixels = write_idx(tmp_path, "train", [2, 0, 1], gz=gz)
    held = write_idx(tmp_path, "t10k", [1, 1], gz=gz)
    found = train(tmp_path)
    assert found.raw_shape == (5, 4, 1)
    assert rows(found) == [(2, pixels[0].tobytes()), (0, pixels[1].tobytes()), (1, pixels[2].tobytes())]
    assert rows(source(tmp_path, "eval")) == [(1, p.tobytes()) for p in held]
    assert found.source_bytes == found.bytes_read() == sum(p.stat().st_size for p in tmp_path.glob("train-*"))


def test_idx_class_names(tmp_path: Path) -> None:
    for name in ("plain", "fashion-mnist", "named"):
        write_idx(tmp_path / name, "train", [0, 1])
    (tmp_path / "named" / "classes.txt").write_text("cat\ndog\n")
    assert train(tmp_path / "plain").classes is None  # numbered when all labels were seen
    assert train(tmp_path / "fashion-mnist").classes == FASHION_MNIST
    assert train(tmp_path / "named").classes == ["cat", "dog"]


def test_idx_without_a_test_part_has_nothing_to_evaluate_on(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", [0, 1])
    assert source(tmp_path, "eval") is None
    cfg = ImagesConfig(source="unused", eval_source=str(tmp_path))
    assert rows(open_images_source(cfg, locate(cfg, "eval"), known=None)) == rows(train(tmp_path))


def test_idx_files_that_do_not_fit(tmp_path: Path) -> None:
    write_idx(tmp_path / "a", "train", [0, 1, 2])
    images, labels = sorted((tmp_path / "a").iterdir())
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has 59 bytes of numbers, but its header says 3 x 5 x 4 = 60"):
        train(tmp_path / "a")
    write_idx(tmp_path / "a", "train", [0, 1, 2])
    labels.write_bytes(images.read_bytes())
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is not an idx file of bytes in 1 dimensions"):
        train(tmp_path / "a")
    labels.unlink()
    with pytest.raises(DataError, match="has no train-labels-idx1-ubyte"):
        train(tmp_path / "a")
    write_idx(tmp_path / "b", "train", [0, 1])
    labels.write_bytes((tmp_path / "b" / labels.name).read_bytes())
    with pytest.raises(DataError, match="has 3 images but train-labels-idx1-ubyte has 2 labels"):
        train(tmp_path / "a")
    write_idx(tmp_path / "c", "train", [0], gz=True)
    cut = tmp_path / "c" / "train-images-idx3-ubyte.gz"
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is not a whole gzip file"):
        train(tmp_path / "c")


# -- folders


def test_class_folders_in_sorted_order(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "train", {"b": 2, "a-b": 1, "a": 2})
    held = write_folder(tmp_path / "val", {"a": 1, "a-b": 1, "b": 1}, seed=50)
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "a" / ".hidden.jpg").write_bytes(picture(99))
    found = train(tmp_path)
    assert found.classes == ["a", "a-b", "b"]
    assert [item.name for item in found.read(START)] == list(files)
    assert rows(found) == [(name.split("/")[0], content) for name, content in files.items()]
    assert [data for _, data in rows(source(tmp_path, "eval", known=found.classes))] == list(held.values())


def test_a_source_without_train_is_one_split(tmp_path: Path) -> None:
    write_folder(tmp_path / "whole", {"a": 1, "train": 1})
    assert train(tmp_path / "whole").classes == ["a", "train"]  # a class may be called so
    assert source(tmp_path / "whole", "eval") is None
    write_folder(tmp_path / "only" / "train", {"a": 1})
    assert train(tmp_path / "only").classes == ["a"]
    assert source(tmp_path / "only", "eval") is None
    for name in ("validation", "test"):
        write_folder(tmp_path / name / "train", {"a": 1})
        write_folder(tmp_path / name / name, {"a": 2})
        assert len(rows(source(tmp_path / name, "eval", known=["a"]))) == 2


def test_class_folders_that_do_not_match(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"a": 1, "b": 1})
    write_folder(tmp_path / "val", {"a": 1})
    with pytest.raises(
        DataError, match=r"val has no images of class b, which the training images have; add the folder"
    ):
        source(tmp_path, "eval", known=["a", "b"])
    write_folder(tmp_path / "val", {"b": 1, "c": 1})
    with pytest.raises(DataError, match="has a class folder c that the training images do not have"):
        source(tmp_path, "eval", known=["a", "b"])
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(DataError, match="train/empty has no images; fill the class folder or remove it"):
        train(tmp_path)


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"has no images: looked for CLASS/NAME with \.jpg.*found folders a"):
        train(tmp_path, format=ImageFormat.folder)


# -- tar


def test_tar_pairs_and_class_folders(tmp_path: Path) -> None:
    pairs = [(f"{n}.{kind}", content) for n in range(3) for kind, content in (("cls", b"%d" % n), ("jpg", picture(n)))]
    write_tar(tmp_path / "pairs" / "x-000.tar", [*pairs[:2], ("0.json", b"{}"), *pairs[2:4]])
    write_tar(tmp_path / "pairs" / "x-001.tar", pairs[4:])
    assert rows(train(tmp_path / "pairs")) == [(n, picture(n)) for n in range(3)]
    members = [
        ("d/zebra/1.b.jpg", picture(1)),
        ("d/ant/1.c.jpg", picture(2)),
        ("d/ant/1.d.png", picture(3, kind="PNG")),
    ]
    write_tar(tmp_path / "one.tar.gz", members)
    assert rows(train(tmp_path / "one.tar.gz")) == [("zebra", picture(1)), ("ant", picture(2)), ("ant", members[2][1])]


def test_tar_files_of_splits_by_name(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "val-0"):
        write_tar(tmp_path / f"set-{name}.tar", [(f"a/{name}.jpg", picture(len(name)))])
    assert [item.name for item in train(tmp_path).read(START)] == [
        "set-train-0.tar:a/train-0.jpg", "set-train-1.tar:a/train-1.jpg",
    ]  # fmt: skip
    held = source(tmp_path, "eval")
    assert held is not None
    assert [item.name for item in held.read(START)] == ["set-val-0.tar:a/val-0.jpg"]


def test_tar_files_that_are_damaged(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [(f"a/{n}.jpg", picture(n)) for n in range(3)])
    whole = (tmp_path / "x.tar").read_bytes()
    third = whole.index(b"a/2.jpg")
    for content in (whole[: third - 600], whole[: third + 300], whole[:third] + b"\7" * 512 + whole[third + 512 :]):
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.tar is not a whole tar file"):
            rows(train(tmp_path / "x.tar"))


def test_tar_images_without_a_class(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("1.jpg", picture(1))])
    with pytest.raises(DataError, match=r"x\.tar:1\.jpg has no class"):
        rows(train(tmp_path / "x.tar"))
    write_tar(tmp_path / "x.tar", [("1.jpg", picture(1)), ("1.cls", b" ")])
    with pytest.raises(DataError, match=r"\.cls file of x\.tar:1\.jpg is empty"):
        rows(train(tmp_path / "x.tar"))


# -- all


def test_every_source_reads_on_after_every_image(tmp_path: Path) -> None:
    write_idx(tmp_path / "idx", "train", range(5))  # type: ignore[arg-type]
    write_folder(tmp_path / "folder", {"a": 2, "b": 3})
    for number in range(2):
        members = [(f"a/{n}.jpg", picture(n)) for n in range(2)] + [("5.jpg", picture(5)), ("5.cls", b"3")]
        write_tar(tmp_path / "tar" / f"{number}.tar.gz", members)
        write_tar(tmp_path / "plain" / f"{number}.tar", members)
        write_parquet(tmp_path / "tables" / f"{number}.parquet", map(picture, range(5)), range(5), row_group_size=2)  # type: ignore[arg-type]
        table = pa.table({"image": [picture(n) for n in range(5)], "label": list(range(5))})
        with pa.ipc.new_file(tmp_path / "tables" / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    for name in ("idx", "folder", "tar", "plain", "tables"):
        found = train(tmp_path / name)
        items = list(found.read(START))
        assert len({item.after for item in items}) == len(items) >= 5
        for number, item in enumerate(items):
            rest = [(after.name, after.label, after.load(), after.after) for after in found.read(item.after)]
            assert rest == [(i.name, i.label, i.load(), i.after) for i in items[number + 1 :]], (name, number)


def test_listings_tell_sources_apart(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 2})
    before = train(tmp_path).digest()
    assert train(tmp_path).digest() == before
    (tmp_path / "a" / "more.jpg").write_bytes(picture(9))
    assert train(tmp_path).digest() != before


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1})
    (tmp_path / "a" / "link.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=r"link\.jpg cannot be read \(No such file or directory\); make it readable"):
        train(tmp_path)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source is not set; give it a folder of images"):
        locate(ImagesConfig(), "train")
    with pytest.raises(DataError, match=r"data\.source=.*gone does not exist; give a folder, a file, or a URL"):
        train(tmp_path / "gone")
    with pytest.raises(ConfigError, match="a data set is named, not a URL"):
        locate(ImagesConfig(source="s3://me:secret@bucket/x", format=ImageFormat.hub), "train")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "inner").mkdir()
    with pytest.raises(
        DataError, match=r"looked for idx files .*found inner/, notes\.txt; give another folder, or say"
    ):
        train(tmp_path)
    with pytest.raises(DataError, match=r"has no \.tar, \.tar\.gz, \.tgz files"):
        train(tmp_path, format=ImageFormat.tar)
    with pytest.raises(DataError, match=r"has no \.parquet, \.arrow files"):
        train(tmp_path, format=ImageFormat.parquet)
    with pytest.raises(DataError, match="has no train-images-idx3-ubyte"):
        train(tmp_path, format=ImageFormat.idx)


def test_classes_txt_that_is_not_a_list_of_names(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", np.array([0, 1]).tolist())
    for content, said in ((b"a\na\n", "names a class twice"), (b"", "is empty"), (b"\xff\xfe\xff", "is not UTF-8")):
        (tmp_path / "classes.txt").write_bytes(content)
        with pytest.raises(DataError, match=rf"classes\.txt .*{said}"):
            train(tmp_path)
