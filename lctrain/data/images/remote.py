"""Files of an object store (or any other place fsspec reads), read again when a read fails or comes short."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from lctrain.config.images import ImagesConfig
from lctrain.data.images.storage import Counter, Entry, Storage
from lctrain.errors import ConfigError, DataError

READERS = 16  # requests on their way: an object store answers each slowly and many at once
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

T = TypeVar("T")


class RemoteStorage(Storage):
    """Everything below a URL, or the one object it names.

    Credentials are what the store's library finds in the environment (for S3: AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY); they appear in no message. sleep: waits between attempts.
    Raises ConfigError for a URL of no known kind, DataError without the library that reads it.
    """

    def __init__(
        self, title: str, url: str, *, cfg: ImagesConfig, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.title, self.name = title, url.rstrip("/").rsplit("/", 1)[-1]
        self.counter, self.readers = Counter(), READERS
        self._attempts, self._timeout_s, self._sleep = cfg.retries + 1, cfg.timeout_s, sleep
        self._fs, root = _filesystem(title, url, cfg)
        self._root = root.rstrip("/")
        self._is_file: bool | None = None

    def children(self) -> tuple[list[str], list[str]]:
        """See Storage."""
        if self._names_file():
            return [], [self._root.rsplit("/", 1)[-1]]
        listing = self._retried("listing", lambda: self._fs.ls(self._root, detail=True, refresh=True))
        folders: set[str] = set()
        files: set[str] = set()
        for info in listing:
            name = info["name"].rstrip("/").rsplit("/", 1)[-1]
            # A store without folders lists an empty object of the folder's own name.
            if not name.startswith(".") and info["name"].rstrip("/") != self._root:
                (folders if info["type"] == "directory" else files).add(name)
        return sorted(folders), sorted(files)

    def below(self, name: str) -> Storage:
        """See Storage."""
        inner = object.__new__(RemoteStorage)
        inner.__dict__ = self.__dict__ | {
            "title": f"{self.title.rstrip('/')}/{name}",
            "_root": f"{self._root}/{name}",
            "_is_file": False,
        }
        return inner

    def walk(self) -> list[Entry]:
        """See Storage."""
        if self._names_file():
            info = self._retried("looking it up", lambda: self._fs.info(self._root, refresh=True))
            return [self._entry(self._root.rsplit("/", 1)[-1], info)]
        found = self._retried("listing", lambda: self._fs.find(self._root, detail=True, refresh=True))
        entries = [self._entry(path[len(self._root) :].lstrip("/"), info) for path, info in found.items()]
        shown = [e for e in entries if e.path and not any(part.startswith(".") for part in e.order)]
        return sorted(shown, key=lambda entry: entry.order)

    def read(self, entry: Entry, start: int = 0, end: int | None = None) -> bytes:
        """See Storage. A short answer counts as a failed one."""
        wanted = (entry.size if end is None else end) - start
        if not wanted:
            return b""
        path = self._root if self._names_file() else f"{self._root}/{entry.path}"
        part = {} if wanted == entry.size else {"start": start, "end": start + wanted}

        def attempt() -> bytes:
            content = self._fetch(path, part)
            self.counter.add(len(content))
            if len(content) != wanted:
                raise _WrongLength(f"{len(content):,} of {wanted:,} bytes came")
            return content

        return self._retried(f"reading {entry.path}", attempt)

    def _fetch(self, path: str, part: dict[str, int]) -> bytes:
        if not self._fs.async_impl:
            return self._fs.cat_file(path, **part)
        from fsspec.asyn import sync

        return sync(self._fs.loop, self._fs._cat_file, path, **part, timeout=self._timeout_s)

    def _names_file(self) -> bool:
        if self._is_file is None:
            info = self._retried("looking it up", lambda: self._fs.info(self._root, refresh=True))
            self._is_file = info["type"] == "file"
        return self._is_file

    def _entry(self, path: str, info: dict[str, Any]) -> Entry:
        if info.get("size") is None:
            info = self._retried(f"looking up {path}", lambda: self._fs.info(info["name"]))
        if info.get("size") is None:
            raise DataError(
                f"{self.title}: the server does not say how long {path} is; copy it to a local folder first"
            )
        tag = next((info[key] for key in ("ETag", "LastModified", "mtime", "created") if key in info), "")
        return Entry(path, info["size"], str(tag))

    def _retried(self, what: str, attempt: Callable[[], T]) -> T:
        """`attempt`, again after growing waits while it fails. Raises DataError at the end."""
        for failed in range(self._attempts):
            try:
                return attempt()
            except DataError:
                raise
            except Exception as error:  # every store's library raises its own
                if mend := _refusal(error):
                    raise DataError(f"{self.title}: {what} failed ({_said(error)}); {mend}") from error
                if failed + 1 == self._attempts:
                    raise DataError(
                        f"{self.title}: {what} failed {self._attempts} times, at last with {_said(error)}; check the "
                        "address (data.endpoint_url for a store other than Amazon's) and the network, or raise "
                        "data.retries or data.timeout_s; a stage that is started again goes on where this one stopped"
                    ) from error
            self._sleep(min(FIRST_WAIT_S * 2**failed, LONGEST_WAIT_S))
        raise AssertionError("at least one attempt is made")


class _WrongLength(OSError):
    """An answer that is not as long as the listing says."""


def _refusal(error: Exception) -> str:
    """What to do about an error that trying again does not mend; "" for the others."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "FileNotFoundError" in kinds:
        return "correct the URL"
    if kinds & {"PermissionError", "NoCredentialsError", "PartialCredentialsError"}:
        return (
            "give credentials that may read it, in the environment (for S3: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY)"
        )
    return ""


def _said(error: Exception) -> str:
    text = re.sub(r"(?<=://)[^/@\s]*@", "", str(error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def _filesystem(title: str, url: str, cfg: ImagesConfig) -> tuple[Any, str]:
    """(fsspec file system, path in it) that does not retry or cache by itself."""
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    is_s3 = url.startswith(("s3://", "s3a://"))
    if is_s3:
        options["endpoint_url"] = cfg.endpoint_url
        options["max_concurrency"] = 1  # more would ask for each file's size first
        options["config_kwargs"] = {
            "connect_timeout": cfg.timeout_s,
            "read_timeout": cfg.timeout_s,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": READERS,
        }
    elif cfg.endpoint_url is not None:
        raise ConfigError(f"data.endpoint_url={cfg.endpoint_url} has no effect on {title}; it goes with s3:// only")
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        library = "pip install 'lctrain[s3]'" if is_s3 else str(error)
        raise DataError(f"{title} needs a library that is not installed; {library}") from error
    except ValueError as error:
        raise ConfigError(f"{title} is no URL that can be read ({error}); give e.g. s3://bucket/prefix") from error
    if is_s3:
        fs.retries = 1  # ours count and wait
    return fs, root
