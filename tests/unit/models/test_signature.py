"""The mapping that tells a checkpoint's model from another."""

from __future__ import annotations

import json

from lctrain.config.model import LoraConfig
from lctrain.models.causal_lm import build_meta
from lctrain.models.signature import signature
from tests.unit.models.tiny_models import config_of


def test_signature_survives_json_and_tells_models_apart() -> None:
    config = config_of()
    mine = signature(config, LoraConfig())
    assert json.loads(json.dumps(mine)) == mine
    assert signature(config_of(), LoraConfig()) == mine
    different = signature(config_of(hidden_size=64), LoraConfig())
    assert {k for k in mine if mine[k] != different[k]} >= {"hidden_size"}
    build_meta(config)
    assert signature(config, LoraConfig()) == mine
