"""The fp16 loss scale: halves, grows, has a floor, survives a checkpoint."""

from __future__ import annotations

import json

import pytest

from lctrain.config.precision import Bf16Config, Fp16Config, Fp32Config
from lctrain.optim.loss_scale import LossScale


def after(scale: LossScale, finite: str) -> list[float]:
    """Values after each of a row of good (.) and overflowing (x) steps."""
    values = []
    for step in finite:
        scale.update(finite=step == ".")
        values.append(scale.value)
    return values


def test_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(Fp16Config(initial_scale=8.0, growth_interval=3))
    assert after(scale, "x...x..x...") == [4, 4, 4, 8, 4, 4, 4, 2, 2, 2, 4]


def test_never_below_one() -> None:
    assert after(LossScale(Fp16Config(initial_scale=2.0)), "xxx") == [1, 1, 1]


@pytest.mark.parametrize("config", [Fp32Config(), Bf16Config()])
def test_always_one_outside_fp16(config: Fp32Config | Bf16Config) -> None:
    scale = LossScale(config)
    assert after(scale, "x.x") == [1, 1, 1]
    scale.load_state_dict({"value": 64.0, "good_steps": 3})  # a checkpoint of an fp16 run
    assert scale.value == 1


def test_continues_from_json_where_it_stood() -> None:
    config = Fp16Config(initial_scale=8.0, growth_interval=3)
    straight, first = LossScale(config), LossScale(config)
    wanted = after(straight, "x.....")
    after(first, "x..")
    second = LossScale(config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert after(second, "...") == wanted[3:]
