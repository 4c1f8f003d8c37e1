"""A Hugging Face data set by name, or a local folder the `datasets` library loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lctrain.config.data import HubConfig
from lctrain.data.records import BadRecord, Content, read_record
from lctrain.data.sources import Source, check_columns
from lctrain.errors import DataError

SHARD_ROWS = 4096


class HubSource(Source):
    """Rows of one split; a shard is (first row, end)."""

    def __init__(self, field: str, path: str, *, cfg: HubConfig) -> None:
        self.title = f"{field}={path}"
        self._name = f"{path}[{cfg.split}]"
        self._fields = {"text_field": cfg.text_field, "messages_field": cfg.messages_field}
        rows = _load(self.title, path, cfg)
        check_columns(self.title, rows.column_names, list(self._fields.values()))
        self._rows = rows.select_columns([c for c in self._fields.values() if c in rows.column_names])
        if not len(rows):
            raise DataError(f"{self.title} has no documents in data.split={cfg.split}; choose another split")
        self.shards = [(start, min(start + SHARD_ROWS, len(rows))) for start in range(0, len(rows), SHARD_ROWS)]

    def digest(self) -> str:
        """Hash of the rows' content, whatever file or cache they come from."""
        import pyarrow as pa

        whole = hashlib.blake2b(digest_size=16)
        for table in self._rows.with_format("arrow").iter(batch_size=1000):
            whole.update(str(table.schema.remove_metadata()).encode())
            for batch in table.combine_chunks().to_batches():
                whole.update(batch.serialize(memory_pool=pa.default_memory_pool()))
        return whole.hexdigest()

    def read(self, shard: tuple[int, int]) -> Iterator[tuple[int, Content | BadRecord]]:
        """The records of some rows."""
        for index, record in enumerate(self._rows.select(range(*shard))):
            yield index, read_record(record, **self._fields)

    def place(self, shard: tuple[int, int], index: int) -> str:
        """`name[split]:row`, counted from 1."""
        return f"{self._name}:{shard[0] + index + 1}"


def _load(title: str, path: str, cfg: HubConfig) -> Any:
    import datasets

    folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            if (folder / "dataset_dict.json").is_file():
                return datasets.load_from_disk(str(folder))[cfg.split]
            if (folder / "state.json").is_file():
                return _one_split(title, datasets.load_from_disk(str(folder)), cfg.split)
            path = str(folder)
        return datasets.load_dataset(path, cfg.subset, split=cfg.split)
    except DataError:
        raise
    except Exception as error:  # the library, its hub client and the readers below it each raise their own
        raise DataError(
            f"{title} does not load with data.subset={cfg.subset} data.split={cfg.split} "
            f"({type(error).__name__}: {error}); check the three names; on a machine without network, load it once "
            "where there is one and bring the cache (HF_HOME), or give data.path a local folder"
        ) from error


def _one_split(title: str, rows: Any, split: str) -> Any:
    if rows.split is not None and str(rows.split) != split:
        raise DataError(
            f"{title} was saved from split {rows.split}, not data.split={split}; set data.split={rows.split}"
        )
    return rows
