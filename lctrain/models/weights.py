"""Pretrained weights: each rank reads only its own rows from safetensors, into any layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from lctrain.errors import ModelError
from lctrain.models.causal_lm import CausalLM
from lctrain.models.lora import base_name, is_adapter
from lctrain.models.pretrained_files import StoredTensor, stored_tensors
from lctrain.ops.shards import full_shape, writable_part

_FLOATS = {"F64", "F32", "F16", "BF16"}
_RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Old checkpoints hold rotary tables, which models compute from their config."""


@torch.no_grad()
def load_pretrained(model: CausalLM, path: str | Path) -> None:
    """Fill a materialized model from a folder of safetensors files, casting to each parameter's dtype.

    A tied parameter is read once, under whichever of its names the folder has. A folder saved from the
    decoder alone (without the causal model's prefix) loads too, if the output embedding is tied.
    Raises ModelError for names that are missing, left over, or of another shape, and for damaged files.
    """
    stored = stored_tensors(path)
    wanted = _wanted(model)
    sources = {names: _find(names, stored, model.model.base_model_prefix) for names in wanted}
    _check(model, path, wanted, sources, stored)
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for names, source in sources.items():
        assert source is not None
        by_file.setdefault(stored[source].file, []).append((source, wanted[names]))
    for file, items in by_file.items():
        _read(file, items)


def _wanted(model: CausalLM) -> dict[tuple[str, ...], torch.Tensor]:
    """Each distinct parameter and persistent buffer under all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in model.model.state_dict(keep_vars=True).items():
        if is_adapter(name):
            continue
        names.setdefault(id(tensor), []).append(base_name(name))
        tensors[id(tensor)] = tensor
    return {tuple(names[key]): tensor for key, tensor in tensors.items()}


def _find(names: tuple[str, ...], stored: dict[str, StoredTensor], prefix: str) -> str | None:
    for name in names:
        for candidate in (name, name.removeprefix(f"{prefix}.")):
            if candidate in stored:
                return candidate
    return None


def _check(
    model: CausalLM,
    path: str | Path,
    wanted: dict[tuple[str, ...], torch.Tensor],
    sources: dict[tuple[str, ...], str | None],
    stored: dict[str, StoredTensor],
) -> None:
    missing = [names[0] for names, source in sources.items() if source is None]
    prefix = f"{model.model.base_model_prefix}."
    known = {n for names in wanted for n in names} | {n.removeprefix(prefix) for names in wanted for n in names}
    ignored = [_RECOMPUTED, *(re.compile(p) for p in model.model._keys_to_ignore_on_load_unexpected or ())]
    unexpected = [n for n in stored if n not in known and not any(p.search(n) for p in ignored)]
    if missing or unexpected:
        raise ModelError(
            f"{path} does not hold the weights of {type(model.model).__name__}: missing {_some(missing)}, "
            f"unexpected {_some(unexpected)}; give the folder this config.json belongs to (a checkpoint with other "
            "names can be converted once: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW, "
            "save_original_format=False))"
        )
    for names, source in sources.items():
        assert source is not None
        entry, tensor = stored[source], wanted[names]
        if entry.shape != tuple(full_shape(tensor)):
            raise ModelError(
                f"{entry.file}: {source} has shape {list(entry.shape)}, the model {list(full_shape(tensor))}; "
                "config.json belongs to another model"
            )
        if tensor.is_floating_point() != (entry.dtype in _FLOATS):
            raise ModelError(
                f"{entry.file}: {source} is stored as {entry.dtype}; give unquantised weights (F32, F16 or BF16)"
            )


def _read(file: Path, items: list[tuple[str, torch.Tensor]]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            for name, tensor in items:
                with writable_part(tensor) as (local, where):
                    local.copy_(_part(tensors, name, where))
    except SafetensorError as error:
        raise ModelError(f"{file} cannot be read ({error}); copy it again") from error


def _part(tensors: Any, name: str, where: tuple[slice, ...]) -> torch.Tensor:
    """Rows of one stored tensor; a scalar, or an empty part, cannot be sliced in the file."""
    if not where:
        return tensors.get_tensor(name)
    if any(part.stop == part.start for part in where):
        return torch.empty([part.stop - part.start for part in where])
    return tensors.get_slice(name)[where]


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
