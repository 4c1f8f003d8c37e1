"""What a folder's safetensors files hold, read from their headers alone. No torch.

A safetensors file is an 8-byte little-endian header length, a JSON header with the byte range of every
tensor, then the bytes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lctrain.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint; dtype is safetensors' name, e.g. BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def check_pretrained(path: str | Path) -> None:
    """Raise ModelError unless the folder's weights are all there: index, files, sizes. Reads headers only."""
    stored_tensors(path)


def stored_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder by name. Raises ModelError naming the file that is missing or damaged."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"model.path={path} is not a folder; give a local folder with safetensors files")
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    for pattern in _PICKLES:
        for file in sorted(folder.glob(pattern)):
            raise ModelError(
                f"{file} is a pickle, which can run code when it is read; convert the model to "
                "safetensors where you trust it (AutoModelForCausalLM.from_pretrained(...)"
                ".save_pretrained(...)) and give that folder"
            )
    raise ModelError(
        f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with weights, or set "
        "model.init=random to start from random ones"
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{folder / INDEX} cannot be read ({error!r}); copy it again") from error
    headers = {name: _read_header(folder / name) for name in sorted(set(weight_map.values()))}
    tensors = {}
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise ModelError(f"{folder / file} does not hold {tensor}, which {INDEX} says it does; copy both again")
        tensors[tensor] = headers[file][tensor]
    return tensors


def _read_header(file: Path) -> dict[str, StoredTensor]:
    if not file.is_file():
        raise ModelError(f"{file} is missing; copy the whole model folder again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ModelError(f"{file} is truncated: {size} bytes do not hold its header; copy it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelError(f"{file} is damaged: its header is not JSON ({error}); copy it again") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        what = "truncated" if size < end else "damaged"
        raise ModelError(f"{file} is {what}: {size} bytes, {end} expected from its header; copy it again")
    return {name: StoredTensor(file, tuple(e["shape"]), e["dtype"]) for name, e in header.items()}
