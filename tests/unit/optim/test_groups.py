"""Who decays, and the optimizer that is built from it."""

from __future__ import annotations

import torch
from torch import nn

from lctrain.config.optim import AdamWConfig
from lctrain.optim.build import build_optimizer
from lctrain.optim.groups import split_groups


class MatrixNorm(nn.Module):
    """A norm whose weight is a matrix: its shape does not give it away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))


class Model(nn.Module):
    """Weights, biases and norms, one frozen and one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(3)
        self.odd = MatrixNorm()
        self.frozen = nn.Linear(3, 3, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_norms_and_biases_do_not_decay() -> None:
    decayed, rest = split_groups(Model(), 0.1)
    assert [n for n, _ in decayed.named] == ["embed.weight", "linear.weight"]
    assert [n for n, _ in rest.named] == ["linear.bias", "norm.weight", "norm.bias", "odd.weight"]
    assert (decayed.weight_decay, rest.weight_decay) == (0.1, 0.0)
    assert decayed.describe() == "decayed: 2 tensors, 30 parameters, weight decay 0.1"
    assert rest.describe() == "norms and biases: 4 tensors, 17 parameters, weight decay 0"


def test_a_real_models_norms_are_found_by_type() -> None:
    from tests.unit.models.tiny_models import random_model

    groups = {g.label: {n for n, _ in g.named} for g in split_groups(random_model("qwen3"), 0.1)}
    assert all(("norm" in n) == (n in groups["norms and biases"]) for names in groups.values() for n in names)
    assert any("q_norm" in n for n in groups["norms and biases"])


def test_empty_groups_are_left_out() -> None:
    assert [g.label for g in split_groups(nn.Linear(2, 2, bias=False), 0.1)] == ["decayed"]


def test_the_optimizer_has_the_groups_and_decays_them_only() -> None:
    model = Model()
    config = AdamWConfig(lr=0.5, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = build_optimizer(config, split_groups(model, config.weight_decay))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert all((g["betas"], g["eps"], g["lr"]) == ((0.8, 0.9), 1e-6, 0.5) for g in optimizer.param_groups)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if name in ("embed.weight", "linear.weight") else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)
