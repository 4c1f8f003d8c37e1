"""What a language job needs across its groups."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lctrain.config.batch_norm import BatchNormConfig
from lctrain.config.classification import ClassificationConfig
from lctrain.config.data import DocumentsConfig, HubConfig
from lctrain.config.model import AttentionKernel, CausalLMConfig, ModelInit
from lctrain.config.optim import AdamWConfig, LarsConfig
from lctrain.config.parallel import FsdpTpConfig, ZeroConfig
from lctrain.config.sizes import Heads
from lctrain.errors import ConfigError

if TYPE_CHECKING:
    from lctrain.config.root import TrainConfig

REFERENCE_ROWS = 1024
"""Queries the reference kernel works on at a time."""
_DENSE_BUDGET = 2 * 2**30


def missing_fields(config: TrainConfig) -> list[str]:
    """What a person must still give, each with an example. Raises ConfigError for data of the other regime."""
    model, data = config.language_model, config.data
    if not isinstance(data, DocumentsConfig):
        raise ConfigError(
            f"data={data.kind} does not fit model={model.kind}, which reads text; choose data=text, jsonl, parquet or "
            "hub, or an image model"
        )
    missing = []
    if model.path is None and model.init is ModelInit.pretrained:
        missing.append(
            "model.path is not set: give the folder with config.json and safetensors, e.g. "
            "model.path=/models/llama-2-7b (or model.init=random to start from random weights)"
        )
    if model.path is None and not model.architecture:
        missing.append("model.architecture is empty and model.path is not set: give one of them")
    if data.path is None:
        what = "a data set name" if isinstance(data, HubConfig) else "a file or folder"
        missing.append(f"data.path is not set: give {what}, e.g. data={data.kind} data.path=...")
    if model.path is None and data.tokenizer is None and model.init is ModelInit.random:
        missing.append(
            "data.tokenizer is not set and there is no model.path to take it from: give a folder, or "
            "data.tokenizer=byte"
        )
    every = next((f"eval.{n}={v:g}" for n in ("every_steps", "every_epochs") if (v := getattr(config.eval, n))), None)
    if every and not (data.held_out or data.eval_path):
        missing.append(
            f"{every} but there is nothing to evaluate on: set data.held_out=0.01 or data.eval_path, or "
            f"{every.split('=')[0]}=0"
        )
    return missing


def check_language(config: TrainConfig) -> None:
    """Fields against each other. Raises ConfigError."""
    _check_tensor_parallel(config)
    _check_dense_scores(config)
    for name, value, default in (
        ("bn", config.bn, BatchNormConfig()),
        ("classification", config.classification, ClassificationConfig()),
    ):
        if value != default:
            field = next(k for k, v in vars(value).items() if v != getattr(default, k))
            given = getattr(value, field)
            raise ConfigError(
                f"{name}.{field}={given.name if isinstance(given, Enum) else given} has no effect on "
                f"model={config.model.kind}; leave {name}.* out"
            )
    if config.logging.mlperf:
        raise ConfigError("logging.mlperf=true logs ResNet's MLPerf benchmark only; set logging.mlperf=false")
    if isinstance(config.parallel, ZeroConfig) and not isinstance(config.optim, AdamWConfig):
        raise ConfigError(
            f"optim={config.optim.kind} does not work with parallel={config.parallel.kind}; choose optim=adamw or "
            "parallel=fsdp"
        )


def _check_dense_scores(config: TrainConfig) -> None:
    """The reference kernel holds the scores of REFERENCE_ROWS queries at a time, masked ones too."""
    known = heads(config)
    if config.language_model.attention is not AttentionKernel.reference or known is None:
        return
    length = config.documents.max_length
    scores = 4 * known.query * min(length, REFERENCE_ROWS) * length * config.train.micro_batch_size
    if scores > _DENSE_BUDGET:
        raise ConfigError(
            f"model.attention=reference would hold {scores / 2**30:.1f} GiB of masked scores at "
            f"data.max_length={length}, more than {_DENSE_BUDGET / 2**30:g} GiB; use model.attention=auto, or lower "
            "data.max_length"
        )


def _check_tensor_parallel(config: TrainConfig) -> None:
    if not isinstance(config.parallel, FsdpTpConfig):
        return
    if config.memory.tiled_mlp is not None:
        raise ConfigError(
            f"memory.tiled_mlp={config.memory.tiled_mlp} does not work with parallel=fsdp_tp, which already splits "
            "every MLP; set memory.tiled_mlp=null or choose parallel=fsdp or fsdp_sp"
        )
    if config.language_model.lora.rank is not None:
        raise ConfigError(
            f"model.lora.rank={config.language_model.lora.rank} does not work with parallel=fsdp_tp; choose "
            "parallel=fsdp, fsdp_sp or fsdp_cp, or model.lora.rank=null"
        )
    if config.language_model.npu_fused:
        raise ConfigError(
            "model.npu_fused=true does not work with parallel=fsdp_tp, whose tensors in parts the fused operators do "
            "not take; choose parallel=fsdp, fsdp_sp or fsdp_cp, or model.npu_fused=false"
        )
    if isinstance(config.optim, LarsConfig):
        raise ConfigError("optim=lars does not work with parallel=fsdp_tp; choose optim=adamw or parallel=fsdp")


def architecture(config: TrainConfig) -> dict[str, Any]:
    """The model's config.json (or model.architecture) as a mapping. Raises ConfigError when unreadable."""
    model = config.language_model
    if model.path is None:
        return model.architecture
    path = Path(model.path).expanduser() / "config.json"
    if not path.parent.is_dir():
        raise ConfigError(f"model.path={model.path} is not a folder; give the model's local folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.path={model.path} has no config.json; give a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore the file") from error


def with_layers(config: TrainConfig, layers: int) -> TrainConfig:
    """The job with at most so many decoder layers of the same widths and heads, and random weights."""
    small = dict(architecture(config))
    small["num_hidden_layers"] = min(layers, small.get("num_hidden_layers", layers))
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = small["layer_types"][: small["num_hidden_layers"]]
    return replace(config, model=replace(config.language_model, path=None, init=ModelInit.random, architecture=small))


def heads(config: TrainConfig) -> Heads | None:
    """Head counts as far as config.json tells them; the model's own checks come later."""
    if not isinstance(config.model, CausalLMConfig):
        return None
    raw = architecture(config)
    query = raw.get("num_attention_heads")
    return Heads(query, raw.get("num_key_value_heads") or query) if isinstance(query, int) else None
