"""Sources of labelled images in tables: Parquet and Arrow files, and Hugging Face data sets."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lctrain.config.images import ImageFormat
from lctrain.errors import DataError
from tests.unit.data.opened_sources import rows, source, train
from tests.unit.data.small_images import picture, write_folder, write_parquet

# -- tables


def test_parquet_columns_of_bytes_and_of_hugging_face(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / "0.parquet", [picture(n) for n in range(5)], [4, 3, 2, 1, 0], row_group_size=2)
    assert rows(train(tmp_path / "a")) == [(4 - n, picture(n)) for n in range(5)]
    features = {
        "info": {"features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["x", "y"]}}}
    }
    table = pa.table({"label": [1, 0], "image": [{"bytes": picture(n), "path": None} for n in range(2)]})
    noted = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    (tmp_path / "b" / "data").mkdir(parents=True)
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        pq.write_table(noted, tmp_path / "b" / "data" / f"{name}.parquet")
    assert train(tmp_path / "b").classes == ["x", "y"]
    assert rows(train(tmp_path / "b")) == rows(source(tmp_path / "b", "eval")) == [(1, picture(0)), (0, picture(1))]


@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"image": [picture(n) for n in range(3)], "label": ["u", "v", "u"]})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert rows(train(tmp_path / "x.arrow")) == [("u", picture(0)), ("v", picture(1)), ("u", picture(2))]


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"photo": [b""], "label": [0]}), path)
    with pytest.raises(
        DataError, match=r"x\.parquet has no column for an image: looked for image, .*; found photo, label"
    ):
        train(path)
    write_parquet(path, [picture(1)], [0.5])
    with pytest.raises(DataError, match=r"x\.parquet:1 has label 0\.5, outside its classes"):
        rows(train(path))
    write_parquet(path, [None, picture(1)], [0, 0])
    with pytest.raises(DataError, match=r"x\.parquet:1 holds no image bytes"):
        rows(train(path))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as a whole file"):
        train(path)


def test_damaged_columns_are_the_files_fault(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, [picture(n) for n in range(3)], [0, 0, 1], compression="snappy")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as a whole file"):
        rows(train(path))


# -- Hugging Face


def test_saved_data_sets(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

    features = Features({"label": ClassLabel(names=["x", "y"]), "img": Image()})
    parts = {
        name: Dataset.from_dict(
            {"label": labels, "img": [{"bytes": picture(n), "path": None} for n in range(len(labels))]},
            features=features,
        )
        for name, labels in (("train", [1, 0, 1]), ("validation", [0]))
    }
    DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    found = train(tmp_path / "both")
    assert found.classes == ["x", "y"]
    assert rows(found) == [(1, picture(0)), (0, picture(1)), (1, picture(2))]
    assert rows(source(tmp_path / "both", "eval")) == [(0, picture(0))]
    parts["train"].save_to_disk(str(tmp_path / "one"))
    assert rows(train(tmp_path / "one")) == rows(found)
    assert source(tmp_path / "one", "eval") is None


def test_image_files_through_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files = write_folder(tmp_path / "set" / "train", {"a": 2, "b": 1})
    found = train(tmp_path / "set", format=ImageFormat.hub)
    assert found.classes == ["a", "b"]
    assert rows(found) == list(zip([0, 0, 1], files.values(), strict=True))


def test_a_name_that_does_not_load() -> None:
    with pytest.raises(DataError, match=r"data\.source=no/such-set is no folder or file here and does not load"):
        train(Path("no/such-set"))
