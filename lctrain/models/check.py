"""Read a model's config and refuse, by name, what would train wrongly. Nothing here builds a whole model."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lctrain.config.model import CausalLMConfig
from lctrain.errors import ConfigError, ModelError
from lctrain.models.rope import apply_rope, check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SINKS = frozenset({"gpt_oss", "deepseek_v4", "mimo_v2_flash", "granite_swa", "granitemoe_swa", "flint", "hy_v4"})
"""transformers' causal models whose attention has learned sinks (they pass s_aux)."""
_LOGIT_FIELDS = re.compile(r"logits?_.*(scal|cap|multiplier)|lm_head_multiplier|output_multiplier")
_DROPOUT_FIELDS = re.compile(r"drop(out)?(_prob)?$|pdrop$|layerdrop$")
_NOT_OURS = re.compile(r"classifier|summary|lora")
_LEGACY_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "torch_dtype", "dtype"}


def read_config(cfg: CausalLMConfig, *, max_length: int) -> PreTrainedConfig:
    """The model's Hugging Face config, with RoPE extended as asked, ready to build from.

    max_length: tokens of the longest sequence. Raises ConfigError for a field of ours and ModelError for a
    model that cannot be trained here, naming the feature.
    """
    config = _from_folder(cfg) if cfg.path is not None else _from_mapping(cfg.architecture)
    refuse(config, causal_lm_class(config, trust_remote_code=cfg.trust_remote_code), max_length=max_length)
    apply_rope(config, cfg.rope_scaling, max_length=max_length)
    check_positions(config, max_length=max_length)
    return config


def _from_folder(cfg: CausalLMConfig) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(str(cfg.path)).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"model.path={cfg.path} is not a folder; give a local folder with config.json (models are not downloaded)"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path / 'config.json'} is missing; give a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be used: {_short(error)}") from error


def _from_mapping(architecture: dict[str, Any]) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    values = dict(architecture)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.architecture.model_type is not set; give transformers' name, e.g. llama")
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=1)
        raise ConfigError(
            f"model.architecture.model_type={model_type} is not one of transformers' models"
            + (f"; did you mean {near[0]}?" if near else "; e.g. llama, qwen3, mistral")
        )
    kind = CONFIG_MAPPING[model_type]
    known = set(kind().to_dict()) | set(kind.attribute_map) | _LEGACY_KEYS
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise ConfigError(
                f"model.architecture.{name} is not a field of {model_type}'s config"
                + (f"; did you mean {near[0]}?" if near else "; remove it")
            )
    try:
        return kind(**values)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"model.architecture cannot be used: {_short(error)}") from error


def causal_lm_class(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> type[PreTrainedModel]:
    """The ...ForCausalLM class of a config. Raises ModelError when it has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore[return-value]
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, config._name_or_path, local_files_only=True)
    raise ModelError(
        f"model_type={config.model_type} is not a causal language model of transformers; "
        "give a decoder-only model (or set model.trust_remote_code=true if the folder has its code)"
    )


def refuse(config: PreTrainedConfig, kind: type[PreTrainedModel], *, max_length: int) -> None:
    """Raise ModelError, naming the feature, for a model this code would silently compute differently."""
    _refuse_kind(config, kind)
    _refuse_layers(config, max_length=max_length)
    values = {**vars(config), **config.to_dict()}
    for name, value in values.items():
        if _NOT_OURS.search(name) or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if _LOGIT_FIELDS.search(name) and value != 1:
            raise ModelError(
                f"{name}={value}: {config.model_type} caps or scales its logits, and the chunked loss "
                "does not; train a model without it"
            )
        if _DROPOUT_FIELDS.search(name) and value > 0:
            raise ModelError(
                f"{name}={value}: dropout draws differ between layouts, and no attention kernel here "
                f"drops; set {name} to 0 in config.json (or model.architecture)"
            )
    if values.get("output_router_logits"):
        raise ModelError(
            "output_router_logits=true asks for a router auxiliary loss, which is not computed; "
            "set it to false in config.json"
        )


def _refuse_kind(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> None:
    name = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{name}: quantization_config is set, but training needs full-precision weights; give the unquantised model"
        )
    if getattr(config, "text_config", None) is not None:
        raise ModelError(f"{name} is a multimodal model; give its text model as a folder of its own")
    if kind._is_stateful:
        raise ModelError(
            f"{name} has recurrent or linear-attention layers, whose state cannot be cut at document "
            "boundaries here; give a model with softmax attention in every layer"
        )
    if name in _SINKS:
        raise ModelError(f"{name} has attention sinks, which no kernel here computes")
    if not kind._supports_attention_backend:
        raise ModelError(
            f"{name}: {kind.__name__} does not support attention backends in this transformers, so "
            "documents could not be kept apart"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ModelError(
            f"{name} has multi-head latent attention (kv_lora_rank): query and value heads of different sizes, which "
            "no kernel here computes"
        )
    if any(isinstance(value, dict) for value in (getattr(config, "rope_parameters", None) or {}).values()):
        raise ModelError(f"{name}: rope_parameters differ between kinds of layers, which is not supported")
    if getattr(config, "is_causal", True) is False:
        raise ModelError(f"{name}: is_causal=false; give a causal model")


def _refuse_layers(config: PreTrainedConfig, *, max_length: int) -> None:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ())
    slides = "sliding_attention" in kinds or not kinds
    if window is not None and slides and window < max_length:
        raise ModelError(
            f"sliding_window={window}: {config.model_type} attends to fewer tokens than data.max_length={max_length}, "
            f"and kernels here attend to the whole document; set data.max_length={window} or less, or set "
            "sliding_window to null in config.json if the model was trained without it"
        )
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other:
        raise ModelError(
            f"layer_types has {other[0]}: {config.model_type} is not softmax attention over the whole "
            "document in every layer (chunked, recurrent or linear attention is not supported)"
        )


def check_plain_head(hf: PreTrainedModel) -> None:
    """Prove that a (meta) model's logits are its output embedding applied to its decoder's states.

    Runs the model's own forward on a stand-in decoder and a three-token output layer, so that scaling or
    capping of logits under any field name is found. Raises ModelError.
    """
    names = {id(module): name for name, module in hf.named_children()}
    head, decoder = names.get(id(hf.get_output_embeddings())), names.get(id(hf.get_decoder()))
    if head is None or decoder is None:
        raise ModelError(f"{type(hf).__name__} is not a decoder followed by an output embedding")
    width = hf.get_output_embeddings().weight.shape[1]
    stand_in = nn.Linear(width, 3, bias=False, device="cpu", dtype=torch.float32)
    hidden = torch.linspace(-30.0, 30.0, 2 * width).view(1, 2, width)
    real = hf._modules[head], hf._modules[decoder]
    hf._modules[head], hf._modules[decoder] = stand_in, _FixedDecoder(hidden)
    try:
        with torch.no_grad():
            nn.init.constant_(stand_in.weight, 1.0)
            logits = hf(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    finally:
        hf._modules[head], hf._modules[decoder] = real
    if not torch.allclose(logits, hidden.sum(-1, keepdim=True).expand(1, 2, 3)):
        raise ModelError(
            f"{type(hf).__name__} changes its states or logits around the output embedding, and the "
            "chunked loss does not; train a model without it"
        )


class _FixedDecoder(nn.Module):
    def __init__(self, hidden_BSC: torch.Tensor) -> None:
        super().__init__()
        self.output = _DecoderOutput(hidden_BSC)

    def forward(self, *args: Any, **kwargs: Any) -> _DecoderOutput:
        return self.output


class _DecoderOutput:
    """States alone, under every name and index a model reads them by."""

    def __init__(self, hidden_BSC: torch.Tensor) -> None:
        self.last_hidden_state = hidden_BSC

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
