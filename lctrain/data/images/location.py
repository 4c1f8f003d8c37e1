"""What data.source or data.eval_source names: a local path, an object store's URL, or a Hugging Face data set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lctrain.config.images import ImageFormat, ImagesConfig
from lctrain.data.images.sources import Split, split_folder
from lctrain.data.images.storage import LocalStorage, Storage
from lctrain.errors import ConfigError, DataError

_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True, kw_only=True)
class Location:
    """One source. field, value: as the user gave them. path: when it is local. is_url: of an object store.

    split: which images are wanted. own: the source was given for evaluation only.
    """

    field: str
    value: str
    path: Path | None
    is_url: bool
    split: Split
    own: bool

    @property
    def title(self) -> str:
        """For messages; without the credentials a URL may hold."""
        return f"{self.field}={_CREDENTIALS.sub('', self.value)}"

    @property
    def name(self) -> str:
        """Of its last part, for file names."""
        return (self.path.resolve().name if self.path else self.value.rstrip("/").rsplit("/", 1)[-1]) or "images"

    @property
    def identity(self) -> str:
        """Where it is; equal for equal places."""
        return str(self.path.resolve()) if self.path else _CREDENTIALS.sub("", self.value.rstrip("/"))

    def signature(self) -> list[str]:
        """What changes when a local source does.

        Empty for what is remote: asking an object store for a million names at every start takes minutes, so what
        was staged from it is taken to be current.
        """
        if self.path is None:
            return []
        folder = split_folder(LocalStorage(self.title, self.path), self.split, own=self.own)
        return folder.signature() if isinstance(folder, LocalStorage) else []

    def storage(self, cfg: ImagesConfig) -> Storage:
        """Its files. Only for what is no data set name."""
        if self.path is not None:
            return LocalStorage(self.title, self.path)
        assert self.is_url, self.value
        from lctrain.data.images.remote import RemoteStorage

        return RemoteStorage(self.title, self.value, cfg=cfg)


def locate(cfg: ImagesConfig, split: Split) -> Location:
    """Where the images of a split come from. Raises ConfigError: not set, DataError: not there."""
    own = split == "eval" and cfg.eval_source is not None
    field, value = ("data.eval_source", cfg.eval_source) if own else ("data.source", cfg.source)
    if value is None:
        raise ConfigError(
            "data.source is not set; give it a folder of images, tar, Parquet or idx files, a Hugging Face data set "
            "name, or the URL of an object store, e.g. data.source=s3://bucket/prefix"
        )
    if value.startswith("file://"):
        value = value.removeprefix("file://")
    if "://" in value:
        _check_format(cfg, field, value)
        return Location(field=field, value=value, path=None, is_url=True, split=split, own=own)
    path = Path(value).expanduser()
    if path.exists():
        return Location(field=field, value=value, path=path, is_url=False, split=split, own=own)
    hub = cfg.format is ImageFormat.hub or (cfg.format is ImageFormat.auto and _HUB_NAME.fullmatch(value))
    if not hub:
        raise DataError(f"{field}={value} does not exist; give a folder, a file, or a URL such as s3://bucket/prefix")
    return Location(field=field, value=value, path=None, is_url=False, split=split, own=own)


def _check_format(cfg: ImagesConfig, field: str, value: str) -> None:
    if cfg.format is ImageFormat.hub:
        raise ConfigError(
            f"data.format=hub with {field}={_CREDENTIALS.sub('', value)}: a data set is named, not a URL; give its "
            "name, or data.format=parquet for its files in an object store"
        )
