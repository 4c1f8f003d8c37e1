"""A step of LARS on ResNet-50's parameters, one thread, against timm's Lars.

    python tools/bench/lars_step.py [--peers DIR]

Both compute the same update (form lr_outside) of the same weights from the same gradients, which are written anew
before each step as a backward pass would, outside of the clock; the weights must be equal afterwards. Both run in the
environment of the peers (see image_loader.py), with the same torch. `timm_foreach` is timm with foreach=True.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from common import Side, finish, give, paired_ratio, take_turns, typical, wait_for_turn, wall_seconds
from image_loader import peer_python

TARGET = 0.55
ROUNDS, STEPS = 8, 10
LR, MOMENTUM, DECAY, TRUST = 0.1, 0.9, 5e-5, 0.001
SIDES = ("ours", "timm", "timm_foreach")


def main() -> None:
    """Measure."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--peers", type=Path, default=Path("~/.cache/lctrain-bench/peers").expanduser())
    python = peer_python(options.parse_args().peers)
    sides = [Side(__file__, name, python=python) for name in SIDES]
    sums = [side.answer() for side in sides]
    assert all(abs(value / sums[0] - 1) < 1e-5 for value in sums), sums
    blocks = take_turns(sides, ROUNDS)
    ratio = paired_ratio(blocks["ours"], blocks["timm"])
    finish(
        {
            "name": "lars_step",
            "ours": typical(blocks["ours"]),
            "peer": typical(blocks["timm"]),
            "ratio": ratio,
            "target": TARGET,
            "ok": ratio <= TARGET,
            "unit": "s",
            "timm_foreach": typical(blocks["timm_foreach"]),
            "timm_foreach_ratio": paired_ratio(blocks["ours"], blocks["timm_foreach"]),
        }
    )


def optimizer_of(name: str, model: Any) -> Any:
    """LARS over the model's parameters; norms and biases are plain SGD without decay."""
    named = list(model.named_parameters())
    layers = [p for _, p in named if p.dim() > 1]
    others = [p for _, p in named if p.dim() == 1]
    if name == "ours":
        from lctrain.config.optim import LarsForm
        from lctrain.optim.lars import Lars

        groups: Iterable[dict[str, Any]] = (
            {"params": layers, "weight_decay": DECAY, "layerwise": True},
            {"params": others, "weight_decay": 0.0, "layerwise": False},
        )
        return Lars(list(groups), lr=LR, momentum=MOMENTUM, trust=TRUST, form=LarsForm.lr_outside)
    from timm.optim import Lars as Timm

    groups = ({"params": layers, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0})
    foreach = True if name == "timm_foreach" else None
    return Timm(list(groups), lr=LR, momentum=MOMENTUM, trust_coeff=TRUST, foreach=foreach)


def side(name: str) -> NoReturn:
    """In a side: blocks of timed steps, after giving a sum over the weights of three."""
    import torch

    from lctrain.config.model import ResNetConfig
    from lctrain.models.image_model import build_image_model, to_channels_last

    torch.set_num_threads(1)
    model = build_image_model(ResNetConfig(), classes=1000, channels=3, image_size=32, seed=0)
    to_channels_last(model)
    optimizer = optimizer_of(name, model)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    # Laid out in memory as autograd lays them out: like their parameters.
    gradients = [
        torch.empty_like(p, requires_grad=False).copy_(torch.randn(p.shape, generator=generator).mul_(1e-2))
        for p in parameters
    ]

    def step() -> float:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()
        return wall_seconds(optimizer.step)

    for _ in range(3):
        step()
    give(sum(float(p.detach().double().abs().sum()) for p in parameters))
    while True:
        wait_for_turn()
        give([step() for _ in range(STEPS)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        # The peers' environment does not have lctrain installed.
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        side(sys.argv[2])
    main()
