"""LARS against vectors worked out by hand, in every published form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lctrain.config.optim import LarsConfig, LarsForm, SgdConfig
from lctrain.optim.build import build_optimizer, optimizer_groups, optimizer_signature
from lctrain.optim.groups import Group
from lctrain.optim.lars import Lars

# w0 = (3, 4); g1 = (.6, .8), gamma1 = 2; g2 = (-.8, .6), gamma2 = 1; eta = .01, beta = .1, m = .9.
VECTORS = {
    LarsForm.paper: ((2.94, 3.92), (2.9026402685, 3.8153771812)),
    LarsForm.momentum_corrected: ((2.94, 3.92), (2.9296402685, 3.8513771812)),
    LarsForm.lr_outside: ((2.9400000004, 3.9200000005), (2.9296402689, 3.8513771822)),
    LarsForm.nesterov: ((2.8860000008, 3.848000001), (2.893257628, 3.7548296627)),
    LarsForm.clipped: ((2.9400000004, 3.9200000005), (2.9462805373, 3.8187543636)),
    LarsForm.fujitsu: ((2.955, 3.94), (2.9270171915, 3.8613377834)),
}


def two_steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> list[list[float]]:
    """The weights after each of the vectors' two steps."""
    seen = []
    for grad, lr in (((0.6, 0.8), 2.0), ((-0.8, 0.6), 1.0)):
        weight.grad = torch.tensor(grad, dtype=weight.dtype).reshape(weight.shape)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        seen.append(weight.detach().flatten().tolist())
    return seen


def lars(weight: nn.Parameter, form: LarsForm, *, layerwise: bool = True) -> Lars:
    """The vectors' optimizer."""
    group = {"params": [weight], "weight_decay": 0.1 if layerwise else 0.0, "layerwise": layerwise}
    trust = 0.02 if form is LarsForm.clipped else 0.01
    return Lars([group], lr=1.0, momentum=0.9, trust=trust, form=form, peak_lr=2.0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", list(LarsForm))
def test_vectors(form: LarsForm, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.delattr(torch, "_fused_sgd_")
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    first, second = two_steps(lars(weight, form), weight)
    assert first == pytest.approx(VECTORS[form][0], rel=1e-9)
    assert second == pytest.approx(VECTORS[form][1], rel=1e-9)


@pytest.mark.parametrize("form", list(LarsForm))
def test_the_path_of_accelerators_agrees(form: LarsForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lars, "_one_by_one", Lars._all_at_once)
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    first, second = two_steps(lars(weight, form), weight)
    assert first == pytest.approx(VECTORS[form][0], rel=1e-9)
    assert second == pytest.approx(VECTORS[form][1], rel=1e-9)


def test_an_excluded_tensor_is_plain_sgd() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    first, second = two_steps(lars(weight, LarsForm.paper, layerwise=False), weight)
    assert first == pytest.approx([1.8, 2.4])
    assert second == pytest.approx([1.52, 0.36])


def test_zero_weights_move_and_zero_gradients_only_decay() -> None:
    for form in LarsForm:
        weight = nn.Parameter(torch.zeros(1, 2))
        optimizer = lars(weight, form)
        weight.grad = torch.ones(1, 2)
        optimizer.step()
        assert weight.detach().tolist() != [[0.0, 0.0]], form
        still = nn.Parameter(torch.ones(1, 2))
        optimizer = lars(still, form)
        still.grad = torch.zeros(1, 2)
        optimizer.step()
        expected = (
            1.0 if form is LarsForm.clipped else pytest.approx(1.0 - 0.1 * (1.9 if form.name == "nesterov" else 1))
        )
        assert still.detach()[0, 0].item() == expected, form


def test_a_rate_of_zero_moves_nothing() -> None:
    for form in LarsForm:
        weight = nn.Parameter(torch.ones(1, 2))
        optimizer = lars(weight, form)
        optimizer.param_groups[0]["lr"] = 0.0
        weight.grad = torch.ones(1, 2)
        optimizer.step()
        assert torch.equal(weight.detach(), torch.ones(1, 2)), form


def test_channels_last_weights_get_the_same_step() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(4, 3, 3, 3), torch.randn(4, 3, 3, 3)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(start.clone().to(memory_format=layout))
        optimizer = lars(weight, LarsForm.paper)
        for _ in range(2):
            weight.grad = grad.clone()  # contiguous: another layout than the weight's
            optimizer.step()
        results.append(weight.detach().contiguous())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_where_a_gradient_lies_changes_nothing() -> None:
    """DDP lays gradients elsewhere after the first step, and a continued run has a first step of its own."""
    torch.manual_seed(0)
    start, grad, memory = torch.randn(96, 96), torch.randn(96, 96), torch.empty(96 * 96 + 32)
    results = []
    for offset in range(32):
        weight = nn.Parameter(start.clone())
        optimizer = lars(weight, LarsForm.paper)
        weight.grad = memory[offset : offset + grad.numel()].view(96, 96).copy_(grad)
        optimizer.step()
        results.append(weight.detach())
    assert all(torch.equal(found, results[0]) for found in results)


def test_the_fused_path_is_exact_for_small_and_large_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    from lctrain.optim import lars as module

    torch.manual_seed(0)
    for factor in (1e-7, 1e-4, 0.3, 5.0):
        w, g, v = torch.randn(3, 50)
        fused = [t.clone() for t in (w, g, v * factor)]
        plain = [t.double() for t in (w, g, v * factor)]
        rates = {"lr": 1.0, "factor": factor, "decay": 1e-4 * factor, "momentum": 0.9, "nesterov": False}
        module._sgd(*fused, **rates)
        with monkeypatch.context() as patch:
            patch.delattr(torch, "_fused_sgd_")
            module._sgd(*plain, **rates)
        for mine, right in ((fused[0], plain[0]), (fused[2], plain[2])):
            torch.testing.assert_close(
                mine.double(), right, rtol=1e-5, atol=1e-6 * factor if mine is fused[2] else 1e-6
            )


def test_groups_by_kind_of_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    config = LarsConfig(lr=2.0, weight_decay=0.1, form=LarsForm.fujitsu)
    groups = optimizer_groups(config, model)
    assert [[n for n, _ in g.named] for g in groups] == [
        ["0.weight", "3.weight"],
        ["0.bias", "1.weight", "1.bias", "3.bias"],
    ]
    optimizer = build_optimizer(config, groups, peak_lr=4.0)
    assert [(g["layerwise"], g["weight_decay"]) for g in optimizer.param_groups] == [(True, 0.1), (False, 0.0)]
    assert optimizer._peak_lr == 4.0


def test_sgd_decays_what_it_is_told_to() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    few: list[Group] = optimizer_groups(SgdConfig(weight_decay=0.1), model)
    assert [g.weight_decay for g in few] == [0.1, 0.0]
    everything = optimizer_groups(SgdConfig(weight_decay=0.1, decay_norms_and_biases=True), model)
    assert [g.weight_decay for g in everything] == [0.1, 0.1]
    assert build_optimizer(SgdConfig(momentum=0.8, nesterov=True), few).param_groups[0]["nesterov"] is True


def test_the_form_is_part_of_what_a_checkpoint_must_agree_on() -> None:
    one, other = (optimizer_signature(LarsConfig(form=f)) for f in (LarsForm.paper, LarsForm.nesterov))
    assert one != other
    assert optimizer_signature(SgdConfig()) == {"optim": "sgd"}
