"""Write a model folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lctrain.errors import ModelError
from lctrain.models.check import causal_lm_class
from lctrain.models.pretrained_files import INDEX, SINGLE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WRAPPER = "model."
"""CausalLM keeps the Hugging Face model in its attribute `model`."""


def hf_name(name: str) -> str:
    """The Hugging Face name of a CausalLM parameter or buffer."""
    assert name.startswith(_WRAPPER), name
    return name.removeprefix(_WRAPPER)


def export_folder(
    config: PreTrainedConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    out: str | Path,
    dtype: torch.dtype,
    shard_bytes: int = 5 * 10**9,
    trust_remote_code: bool = False,
) -> None:
    """Write config.json and safetensors of at most `shard_bytes` each into `out`.

    tensors: (Hugging Face name, whole tensor) in any order, persistent buffers included: a model's
    state_dict, its names through `hf_name`. Read once, one shard in memory at a time. Floating-point
    tensors are cast to `dtype`; a tied parameter is written under one name. Raises ModelError when `out`
    already holds weights.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*.safetensors")):
        raise ModelError(f"{out} already holds weights; give a new folder")
    kind = causal_lm_class(config, trust_remote_code=trust_remote_code)
    tied = set(kind._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    kept = ((name, _cast(tensor, dtype)) for name, tensor in tensors if name not in tied)
    _write_shards(out, kept, shard_bytes=shard_bytes)
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [kind.__name__], dtype
    config.save_pretrained(out)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


def _write_shards(out: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int) -> None:
    """Shards are numbered when their count is known: written aside, then renamed."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    filled = total = 0
    for name, tensor in tensors:
        if pending and filled + tensor.nbytes > shard_bytes:
            shards.append(_write(out, len(shards), pending))
            pending, filled = {}, 0
        pending[name] = tensor
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    shards.append(_write(out, len(shards), pending))
    if len(shards) == 1:
        _aside(out, 0).rename(out / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _aside(out, number).rename(out / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(out: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    from safetensors.torch import save_file

    save_file(tensors, str(_aside(out, number)), metadata={"format": "pt"})
    return list(tensors)


def _aside(out: Path, number: int) -> Path:
    return out / f"shard-{number}.tmp"
