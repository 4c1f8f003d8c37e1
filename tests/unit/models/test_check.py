"""Models and configs refused, each by the name of its feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lctrain.config.model import CausalLMConfig, ModelInit
from lctrain.errors import ConfigError, LctrainError, ModelError
from lctrain.models.causal_lm import build_meta
from lctrain.models.check import read_config
from tests.unit.models.tiny_models import TINY, config_of


def _folder(path: Path, config: Any) -> CausalLMConfig:
    path.joinpath("config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return CausalLMConfig(path=str(path))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 64}, "softcapping=[35]0.*caps or scales its logits"),
        ("mistral", {"sliding_window": 16}, "sliding_window=16.*data.max_length=24.*null"),
        ("gpt_oss", {"head_dim": 8}, "gpt_oss has attention sinks"),
        ("mamba", None, "mamba has recurrent or linear-attention"),
        ("qwen3_next", None, "recurrent or linear-attention"),
        ("t5", None, "model_type=t5 is not a causal language model"),
        ("bart", None, "model_type=bart is not a causal language model"),
        ("llama4_text", {"pad_token_id": 0}, "layer_types has chunked_attention"),
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("gemma3", None, "gemma3 is a multimodal model"),
        ("stablelm", {}, "does not support attention backends"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("gpt2", None, "(resid|embd|attn)_pdrop=0.1"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ("cohere", {}, "logit_scale=0.0625"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits=true"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_refused_by_name(tmp_path: Path, family: str, changes: dict[str, Any] | None, message: str) -> None:
    values = {"model_type": family} if changes is None else {"model_type": family, **TINY, **changes}
    with pytest.raises(ModelError, match=message):
        read_config(_folder(tmp_path, values), max_length=24)


def test_scaled_logits_are_found_whatever_the_field_is_called() -> None:
    """minicpm3 divides its states before the output embedding; its config says so in no field about logits."""
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

    from lctrain.models.check import check_plain_head

    config = MiniCPM3Config(**TINY, pad_token_id=0)
    model = MiniCPM3ForCausalLM(config)
    with pytest.raises(ModelError, match="MiniCPM3ForCausalLM changes its states or logits"):
        check_plain_head(model)


def test_a_window_of_the_whole_sequence_is_accepted() -> None:
    assert config_of("mistral", sliding_window=24).sliding_window == 24
    layers = ["sliding_attention", "full_attention"]
    assert config_of("qwen3", use_sliding_window=True, sliding_window=24, layer_types=layers).sliding_window == 24
    with pytest.raises(ModelError, match="sliding_window=23"):
        config_of("qwen3", use_sliding_window=True, sliding_window=23, layer_types=layers)
    assert config_of("qwen3", use_sliding_window=False, sliding_window=4).model_type == "qwen3"


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"hidden_size": 32}, "model_type is not set"),
        ({"model_type": "lama"}, "model_type=lama.*did you mean llama"),
        ({"model_type": "llama", "num_hidden_layer": 3}, "num_hidden_layer is not.*did you mean num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": "wide"}, "model.architecture cannot be used.*hidden_size"),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}, "not a multiple"),
    ],
)
def test_architecture_mappings_are_checked(architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(CausalLMConfig(architecture=architecture, init=ModelInit.random), max_length=24)


def test_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_config(CausalLMConfig(path=str(tmp_path / "none")), max_length=24)
    with pytest.raises(ModelError, match=r"config.json is missing"):
        read_config(CausalLMConfig(path=str(tmp_path)), max_length=24)
    with pytest.raises(ModelError, match=r"config.json cannot be used"):
        read_config(_folder(tmp_path, "{"), max_length=24)
    with pytest.raises(ModelError, match=r"config.json cannot be used.*nonesuch"):
        read_config(_folder(tmp_path, {"model_type": "nonesuch"}), max_length=24)
    remote = {"model_type": "nonesuch", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    with pytest.raises(LctrainError, match=r"config.json cannot be used"):
        read_config(_folder(tmp_path, remote), max_length=24)
    assert read_config(_folder(tmp_path, {"model_type": "llama", **TINY}), max_length=24).hidden_size == 32


def test_remote_code_runs_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    cfg = _folder(tmp_path, {"model_type": "mine", "auto_map": auto_map, **TINY})
    with pytest.raises(ModelError, match=r"config.json cannot be used"):
        read_config(cfg, max_length=24)
    cfg.trust_remote_code = True
    config = read_config(cfg, max_length=24)
    assert type(build_meta(config, trust_remote_code=True).model).__name__ == "Model"
