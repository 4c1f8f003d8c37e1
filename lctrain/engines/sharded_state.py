"""Sharded tensors in and out of torch's distributed checkpoint (DCP), by parameter name.

Only tensors go in: everything else a run needs is JSON beside them. Nothing is gathered; a rank
writes the shards it holds, and reads the shards it needs whatever layout wrote them.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule

from lctrain.errors import CheckpointError

MODEL, OPTIM = "model.", "optim."


def model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters (tied ones once) and persistent buffers of `module` by name; sharded ones as their shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # After a forward pass without a backward (an evaluation) the root's parameters are still whole.
            part.reshard()
    tensors: dict[str, torch.Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return {MODEL + name: tensor.detach() for name, tensor in tensors.items()} | buffers(module)


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers of `module` by name."""
    kept = {
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        for name in owner._buffers.keys() - owner._non_persistent_buffers_set
    }
    return {MODEL + name: buffer for name, buffer in module.named_buffers() if name in kept}


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name and state key."""
    return {
        f"{OPTIM}{name}.{key}": value
        for name, param in module.named_parameters()
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor)
    }


def write(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, companions: dict[str, torch.Tensor] | None = None
) -> None:
    """Write this rank's shards of the model, the optimizer and `companions`. A collective over all ranks."""
    state = model_tensors(module)
    write_tensors(folder, state | optimizer_tensors(module, optimizer) | (companions or {}))


def write_tensors(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write this rank's shards of `state`. A collective over all ranks."""
    save(state, storage_writer=FileSystemWriter(folder, sync_files=True))


def read(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    companions: dict[str, torch.Tensor] | None = None,
) -> None:
    """Read into `module` and `companions`, and into `optimizer` when given. A collective over all ranks.

    Raises CheckpointError when tensors are missing or have another shape.
    """
    _check_companions(folder, companions or {})
    state: dict[str, torch.Tensor] = model_tensors(module)
    state |= companions or {}
    if optimizer is not None:
        state |= _empty_optimizer_state(stored_keys(folder), module, optimizer)
    read_tensors(folder, state)


def _check_companions(folder: Path, companions: dict[str, torch.Tensor]) -> None:
    missing = sorted(companions.keys() - stored_keys(folder).keys())
    if missing:
        raise CheckpointError(
            f"{folder} holds no {missing[0]} (and {len(missing) - 1} more): it was written by a run without a moving "
            "average; leave classification.ema_decay out to continue it"
        )


def stored_keys(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds: name to DCP's metadata. Raises CheckpointError when it cannot be read."""
    return TensorReader(folder).read_metadata().state_dict_metadata


def read_tensors(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Read this rank's shards into the tensors of `state`. A collective over all ranks.

    Raises CheckpointError when tensors are missing or have another shape.
    """
    _check_shapes(folder, stored_keys(folder), state)
    with warnings.catch_warnings():
        # Exporting reads in one process without any group, which DCP warns about even when told.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=TensorReader(folder), no_dist=not dist.is_initialized())


def _check_shapes(folder: Path, stored: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        meta = stored.get(name)
        if not isinstance(meta, TensorStorageMetadata):
            raise CheckpointError(f"{folder} has no {name.removeprefix(MODEL)}; it is a checkpoint of another model")
        if meta.size != tensor.shape:
            raise CheckpointError(
                f"{folder}: {name.removeprefix(MODEL)} is {list(meta.size)} but the model's is {list(tensor.shape)}; "
                "it is a checkpoint of another model"
            )


def _empty_optimizer_state(
    stored: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """State tensors to read into, laid out like their parameters, put into `optimizer` at once.

    What keys there are is taken from the checkpoint, so this serves any optimizer with tensor state.
    """
    wanted: dict[str, torch.Tensor] = {}
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, param in module.named_parameters():
        if id(param) not in owned:
            continue
        prefix = f"{OPTIM}{name}."
        for full in (n for n in stored if n.startswith(prefix) and "." not in n[len(prefix) :]):
            meta = stored[full]
            same = meta.size == param.shape
            value = (
                torch.zeros_like(param, dtype=meta.properties.dtype, requires_grad=False)
                if same
                else torch.zeros(meta.size, dtype=meta.properties.dtype)
            )
            optimizer.state[param][full[len(prefix) :]] = value
            wanted[full] = value
    return wanted


class TensorReader(FileSystemReader):
    """DCP's reader with an index that cannot run code: its pickle may name DCP's own classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's index. Raises CheckpointError when it is not one DCP wrote."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
            if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        except Exception as error:  # damaged bytes make an unpickler fail in any way
            raise CheckpointError(
                f"{path} cannot be read as a checkpoint index ({error}); use another checkpoint"
            ) from error
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    _NAMES = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        plain_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if plain_dtype or (module, name) in (*self._NAMES, (self._FILES, "_StorageInfo")):
            return super().find_class(module, name)
        found = super().find_class(module, name) if module == self._METADATA and "." not in name else None
        # Its own classes, and not what it imported.
        if isinstance(found, type) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
