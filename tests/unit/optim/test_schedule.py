"""Learning rates by hand: the warm-up, the shape, the floor, the last step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lctrain.config.optim import LarsConfig, SgdConfig
from lctrain.config.registry import classes
from lctrain.config.schedule import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    PolynomialConfig,
    ScheduleConfig,
    StepConfig,
)
from lctrain.optim.schedule import describe_peak, lr_factor, warmup_steps


def curve(config: ScheduleConfig, total: int) -> list[float]:
    """The factor of every step."""
    return [lr_factor(config, step, total) for step in range(total)]


def test_warm_up_is_linear_and_reaches_one_on_its_last_step() -> None:
    for cls in classes("schedule").values():
        assert curve(cls(warmup_steps=4), 9)[:4] == [0.25, 0.5, 0.75, 1.0], cls


def test_constant() -> None:
    assert curve(ConstantConfig(), 3) == [1.0, 1.0, 1.0]
    assert curve(ConstantConfig(warmup_steps=2), 4) == [0.5, 1.0, 1.0, 1.0]


def test_linear() -> None:
    assert curve(LinearConfig(warmup_steps=1), 5) == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])
    assert curve(LinearConfig(min_lr_ratio=0.2), 4) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine() -> None:
    half = 0.5 * (1 + math.cos(math.pi / 4))
    assert curve(CosineConfig(), 4) == pytest.approx([1.0, half, 0.5, 1 - half])
    assert curve(CosineConfig(min_lr_ratio=0.1), 4) == pytest.approx(
        [1.0, 0.1 + 0.9 * half, 0.55, 0.1 + 0.9 * (1 - half)]
    )


def test_polynomial() -> None:
    assert curve(PolynomialConfig(power=2.0), 4) == pytest.approx([1.0, 0.5625, 0.25, 0.0625])
    assert curve(PolynomialConfig(power=1.0, min_lr_ratio=0.3), 4) == pytest.approx(
        curve(LinearConfig(min_lr_ratio=0.3), 4)
    )


def test_a_ratio_of_steps_is_rounded_up() -> None:
    assert warmup_steps(ConstantConfig(warmup_ratio=0.03), 100) == 3
    assert warmup_steps(ConstantConfig(warmup_ratio=0.03), 101) == 4
    assert warmup_steps(ConstantConfig(warmup_ratio=0.0), 100) == 0
    assert curve(ConstantConfig(warmup_ratio=0.5), 4) == curve(ConstantConfig(warmup_steps=2), 4)


def test_a_run_shorter_than_its_warm_up() -> None:
    assert curve(CosineConfig(warmup_steps=10), 3) == pytest.approx([0.1, 0.2, 0.3])
    assert curve(CosineConfig(warmup_steps=3), 3) == pytest.approx([1 / 3, 2 / 3, 1.0])


@given(
    st.sampled_from([CosineConfig, LinearConfig, PolynomialConfig]),
    st.integers(1, 200),
    st.integers(0, 50),
    st.floats(0, 1),
)
def test_it_only_falls_after_warm_up_stays_above_the_floor_and_would_reach_it_next(
    cls: type, total: int, warmup: int, floor: float
) -> None:
    config = cls(warmup_steps=warmup, min_lr_ratio=floor)
    factors = curve(config, total)
    after = factors[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    assert all(0 <= f <= 1 + 1e-12 for f in factors)
    if total > warmup:
        assert floor < 1.0 - 1e-9 or factors[-1] == pytest.approx(1.0)
        assert factors[-1] >= floor - 1e-12
        assert floor > 1.0 - 1e-9 or factors[-1] > floor
        assert lr_factor(config, total, total) == pytest.approx(floor)
        assert lr_factor(config, total + 5, total) == pytest.approx(floor)
    # A pure function of the step: any order of asking gives the same.
    assert [lr_factor(config, step, total) for step in reversed(range(total))][::-1] == factors


def test_step_falls_at_its_epochs() -> None:
    config = StepConfig(warmup_steps=1, epochs=[1.5, 3.0], gamma=0.1)
    factors = [lr_factor(config, step, 8, steps_per_epoch=2.0) for step in range(8)]
    assert factors == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])


def test_a_warm_up_in_epochs() -> None:
    config = ConstantConfig(warmup_epochs=1.5)
    assert warmup_steps(config, 100, steps_per_epoch=4.0) == 6
    assert lr_factor(config, 2, 100, steps_per_epoch=4.0) == 0.5


def test_a_floor_given_as_a_rate() -> None:
    """MLPerf: end + (lr0 - end) * (1 - (it - W) / (T - W)) ** 2."""
    config = PolynomialConfig(warmup_steps=2, power=2.0, end_lr=1e-4)
    rate = 17.0 * lr_factor(config, 6, 10, peak=17.0)
    assert rate == pytest.approx(1e-4 + (17.0 - 1e-4) * 0.25)


def test_the_peak_scales_with_the_batch_and_says_so() -> None:
    config = SgdConfig(lr=0.1, base_lr_per=256)
    assert config.peak_lr(8192) == pytest.approx(3.2)
    assert "3.2 = optim.lr 0.1 x batch 8,192 / 256" in describe_peak(config, 8192)
    assert LarsConfig(lr=17.0).peak_lr(8192) == 17.0
    assert "17 (optim.lr)" in describe_peak(LarsConfig(lr=17.0), 8192)
