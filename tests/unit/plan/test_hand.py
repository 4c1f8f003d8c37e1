"""The arithmetic a person would do, for a model of exactly seven billion numbers."""

from __future__ import annotations

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.resolve import resolve
from lctrain.plan.hand import Hand, by_hand
from tests.support.tiny import tiny_config

SEVEN_B = 7_000_000_000
GB = 10**9


def hand(*overrides: str, ranks: int = 8, trained: int = SEVEN_B) -> Hand:
    """7B under a layout."""
    config = tiny_config("train.global_batch_size=8", *overrides)
    return by_hand(config, resolve(config, world_size=ranks).sizes, parameters=SEVEN_B, trained=trained)


def test_mixed_precision_is_14_and_14_and_28_and_56() -> None:
    found = hand("parallel=ddp", "precision=bf16")
    parts = found.weights, found.gradients, found.master_weights, found.optimizer_state
    assert tuple(part / GB for part in parts) == (14, 14, 28, 56)
    assert found.total == found.per_rank == 112 * GB


def test_fp32_is_28_and_28_and_56_without_a_master() -> None:
    found = hand("parallel=ddp", "precision=fp32")
    parts = found.weights, found.gradients, found.master_weights, found.optimizer_state
    assert tuple(part / GB for part in parts) == (28, 28, 0, 56)
    assert found.per_rank == 112 * GB


@pytest.mark.parametrize(
    ("overrides", "per_rank"),
    [
        (["parallel=fsdp"], 14.0),
        (["parallel=fsdp_sp", "parallel.sp_size=4"], 14.0),
        (["parallel=fsdp_cp"], 14.0),
        (["parallel=fsdp_tp", "parallel.tp_size=2"], 14.0),
        (["parallel=hsdp", "parallel.dp_replicate_size=2"], 28.0),
        (["parallel=zero1"], 14 + 14 + (28 + 56) / 8),
        (["parallel=zero2"], 14 + (14 + 28 + 56) / 8),
        (["parallel=zero3"], 14.0),
        (["parallel=zero3_sp", "parallel.sp_size=2"], 14.0),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_pieces_are_the_layouts(overrides: list[str], per_rank: float) -> None:
    found = hand("precision=bf16", *overrides)
    assert found.per_rank / GB == pytest.approx(per_rank)
    assert found.total == 112 * GB


def test_one_rank_holds_all() -> None:
    assert hand("parallel=single", "precision=bf16", ranks=1).per_rank == 112 * GB


def test_frozen_weights_have_no_gradient_and_no_state() -> None:
    found = hand("parallel=ddp", "precision=bf16", trained=40_000_000)
    assert found.weights == 14 * GB
    assert found.total - found.weights == 40_000_000 * (2 + 4 + 8)


@pytest.mark.parametrize(("momentum", "each"), [(0.9, 4), (0.0, 0)])
def test_sgd_keeps_a_momentum_or_nothing(momentum: float, each: int) -> None:
    config = compose_config(["recipe=resnet8_fashion_mnist", f"optim.momentum={momentum}"])
    found = by_hand(config, resolve(config).sizes, parameters=100, trained=100)
    assert (found.weights, found.gradients, found.optimizer_state) == (400, 400, 100 * each)


def test_lars_keeps_a_momentum() -> None:
    config = compose_config(["recipe=resnet50_imagenet", "preset=rn50_lars_8k", "data.source=unread"])
    found = by_hand(config, resolve(config).sizes, parameters=100, trained=100)
    assert (found.weights, found.master_weights, found.optimizer_state) == (200, 400, 400)
