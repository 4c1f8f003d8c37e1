"""RoPE extension: in the config before the build, in the buffers after it, in the exported folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lctrain.config.model import CausalLMConfig, ModelInit, RopeConfig, RopeType
from lctrain.errors import ConfigError, ModelError
from lctrain.models.causal_lm import build_meta
from lctrain.models.check import read_config
from lctrain.models.materialize import init_random, materialize_empty
from lctrain.models.rope import expected_inv_freq, verify_inv_freq
from tests.unit.models.tiny_models import TINY, export

BASE = {"model_type": "llama", **TINY, "rope_theta": 50_000.0}


def _read(rope: RopeConfig | None = None, max_length: int = 512, **changes: Any) -> Any:
    cfg = CausalLMConfig(architecture={**BASE, **changes}, init=ModelInit.random, rope_scaling=rope or RopeConfig())
    return read_config(cfg, max_length=max_length)


def _theirs(kind: str, max_position_embeddings: int, seq_len: int | None = None, **parameters: Any) -> torch.Tensor:
    """transformers' frequencies for a config written by hand."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {**TINY, "max_position_embeddings": max_position_embeddings}
    config = LlamaConfig(**values, rope_parameters={"rope_type": kind, "rope_theta": 50_000.0, **parameters})
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len)[0]


CASES = {
    "linear": (RopeConfig(type=RopeType.linear, factor=4), 512, _theirs("linear", 512, factor=4.0)),
    "yarn": (
        RopeConfig(type=RopeType.yarn, factor=4, beta_fast=16),
        512,
        _theirs("yarn", 512, factor=4.0, beta_fast=16.0, original_max_position_embeddings=128),
    ),
    "llama3": (
        RopeConfig(type=RopeType.llama3, factor=8),
        1024,
        _theirs(
            "llama3", 1024, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
        ),
    ),
    "dynamic": (
        RopeConfig(type=RopeType.dynamic, factor=4),
        512,
        _theirs("dynamic", 128, seq_len=512, factor=4.0),
    ),
    "theta": (
        RopeConfig(type=RopeType.theta, theta=1e6),
        512,
        1.0 / 1e6 ** (torch.arange(0, 8, 2, dtype=torch.float) / 8),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_extension_reaches_the_buffers_and_the_exported_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rope, positions, want = CASES[name]
    config = _read(rope)
    assert config.max_position_embeddings == positions
    model = build_meta(config)
    torch.testing.assert_close(model.model.model.rotary_emb.inv_freq, want, rtol=1e-6, atol=0)
    materialize_empty(model, torch.device("cpu"))
    init_random(model, seed=0)
    verify_inv_freq(model, config)
    export(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, want, rtol=1e-6, atol=0)
    assert loaded.model.rotary_emb.attention_scaling == model.model.model.rotary_emb.attention_scaling
    ids = torch.randint(0, 97, (1, 400))
    loaded(input_ids=ids)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, want, rtol=1e-6, atol=0)


def test_theta_stays_the_models_unless_given() -> None:
    assert _read(RopeConfig(type=RopeType.yarn, factor=4)).rope_parameters["rope_theta"] == 50_000.0
    assert _read(RopeConfig(type=RopeType.yarn, factor=4, theta=7.0)).rope_parameters["rope_theta"] == 7.0


def test_a_new_factor_counts_from_where_the_model_was_trained() -> None:
    """Not from where an earlier extension took it."""
    before = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    config = _read(RopeConfig(type=RopeType.linear, factor=8), rope_parameters=before)
    assert config.max_position_embeddings == 512
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0}


def test_partial_rotary_is_kept() -> None:
    config = _read(
        RopeConfig(type=RopeType.linear, factor=4),
        model_type="phi3", pad_token_id=0, sliding_window=None, partial_rotary_factor=0.5,
    )  # fmt: skip
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert len(expected_inv_freq(config)) == 2
    build_meta(config)


def test_a_models_own_dynamic_scaling_is_fixed_at_the_length_trained_on() -> None:
    own = {"rope_type": "dynamic", "rope_theta": 50_000.0, "factor": 4.0}
    config = _read(rope_parameters=own, max_length=256)
    want = _theirs("dynamic", 128, seq_len=256, factor=4.0)
    torch.testing.assert_close(build_meta(config).model.model.rotary_emb.inv_freq, want, rtol=1e-6, atol=0)
    assert _read(rope_parameters=own, max_length=128).rope_parameters["rope_type"] == "dynamic"
    with pytest.raises(ConfigError, match=r"data.max_length=513"):
        _read(rope_parameters=own, max_length=513)


def test_more_positions_than_the_model_has() -> None:
    with pytest.raises(ConfigError, match=r"data.max_length=512.*128 positions.*rope_scaling.type=yarn.*factor=4"):
        _read()
    with pytest.raises(ConfigError, match=r"data.max_length=512.*256 positions.*factor=4,"):
        _read(RopeConfig(type=RopeType.yarn, factor=2))
    gpt2 = {"n_inner": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    architecture = {k: v for k, v in TINY.items() if k not in ("num_key_value_heads", "intermediate_size")}
    cfg = CausalLMConfig(architecture={"model_type": "gpt2", **architecture, **gpt2}, init=ModelInit.random)
    with pytest.raises(ConfigError, match="128 positions gpt2 has learned"):
        read_config(cfg, max_length=512)
    cfg.rope_scaling = RopeConfig(type=RopeType.yarn, factor=4)
    with pytest.raises(ConfigError, match=r"gpt2 has no .single. rotary embedding"):
        read_config(cfg, max_length=512)


def test_longrope_past_its_trained_length_is_refused() -> None:
    own = {
        "rope_type": "longrope", "rope_theta": 50_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 128, "factor": 4.0,
    }  # fmt: skip
    changes = {"rope_parameters": own, "max_position_embeddings": 512}
    assert _read(max_length=128, **changes).rope_parameters["rope_type"] == "longrope"
    with pytest.raises(ConfigError, match=r"longrope.*data.max_length=128.*factor=4"):
        _read(max_length=512, **changes)


def test_buffers_that_are_not_what_the_config_asks_for_are_found() -> None:
    config = _read(RopeConfig(type=RopeType.yarn, factor=4))
    model = build_meta(config)
    model.model.model.rotary_emb.inv_freq[1] *= 1 + 1e-4
    with pytest.raises(ModelError, match="inv_freq is not what"):
        verify_inv_freq(model, config)
    del model.model.model.rotary_emb.inv_freq
    with pytest.raises(ModelError, match="no inv_freq buffer"):
        verify_inv_freq(model, config)


def test_dynamic_is_the_equation_of_ntk_scaling() -> None:
    config = _read(RopeConfig(type=RopeType.dynamic, factor=4))
    assert math.isclose(config.rope_parameters["rope_theta"], 50_000.0 * (4 * 512 / 128 - 3) ** (8 / 6))
