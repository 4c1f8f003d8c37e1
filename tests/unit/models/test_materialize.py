"""Storage for meta models, and random weights."""

from __future__ import annotations

import pytest
import torch

from lctrain.errors import ModelError
from lctrain.models.causal_lm import build_meta
from lctrain.models.materialize import init_random, materialize_empty
from tests.unit.models.tiny_models import FAMILIES, config_of, random_model


def _empty(family: str = "llama", **changes):
    model = build_meta(config_of(family, **changes))
    materialize_empty(model, torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_ties_buffers_and_trainability_survive(family: str) -> None:
    model = build_meta(config_of(family))
    before = {name: b.clone() for name, b in model.named_buffers()}
    materialize_empty(model, torch.device("cpu"))
    assert all(not p.is_meta and p.requires_grad for p in model.parameters())
    tied = model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert tied == (family == "qwen2")
    assert {n: b.tolist() for n, b in model.named_buffers()} == {n: b.tolist() for n, b in before.items()}


def test_same_seed_same_weights_and_hash_without_touching_the_random_state() -> None:
    first, second, other = _empty(), _empty(), _empty()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    digests = [init_random(first, seed=5), init_random(second, seed=5), init_random(other, seed=6)]
    assert torch.equal(torch.rand(3), expected)
    assert digests[0] == digests[1] != digests[2]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_distribution_is_the_models_own(family: str) -> None:
    model = random_model(family)
    for name, parameter in model.model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.count_nonzero(parameter) == 0, name
        else:
            assert abs(parameter.std().item() - 0.2) < 0.03, name


def test_layers_differ_from_each_other() -> None:
    layers = random_model().model.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[0].mlp.gate_proj.weight)


def test_a_parameter_the_models_code_does_not_set_is_an_error() -> None:
    model = _empty()
    model.model.model.layers[0].mlp.extra = torch.nn.Parameter(torch.empty(3))
    with pytest.raises(ModelError, match=r"does not initialise model.layers.0.mlp.extra"):
        init_random(model, seed=0)
