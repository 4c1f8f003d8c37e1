"""Every one-field check, as a table: what is refused, and the edge that is not."""

from __future__ import annotations

from typing import Any

import pytest

from lctrain.config.data import DocumentsConfig
from lctrain.config.launch import LaunchConfig, ModelArtsConfig, SlurmConfig, TorchrunConfig, split_endpoint
from lctrain.config.memory import MemoryConfig
from lctrain.config.model import RopeConfig, RopeType
from lctrain.config.optim import AdamWConfig
from lctrain.config.parallel import DdpConfig
from lctrain.config.precision import Fp16Config
from lctrain.config.root import CheckpointConfig, EvalConfig, LoggingConfig, LoopConfig
from lctrain.config.schedule import CosineConfig, PolynomialConfig, ScheduleConfig
from lctrain.errors import ConfigError

# (class, section, field, refused values, accepted values at the edge)
BOUNDS: list[tuple[type, str, str, list[Any], list[Any]]] = [
    (DocumentsConfig, "data", "max_length", [1, 0, -5], [2]),
    (DocumentsConfig, "data", "held_out", [-0.1, 1.0, 2.0], [0.0, 0.99]),
    (DocumentsConfig, "data", "num_proc", [0, -1], [1, None]),
    (DocumentsConfig, "data", "prefetch", [-1], [0]),
    (MemoryConfig, "memory", "loss_chunk_mb", [0, -1], [1]),
    (AdamWConfig, "optim", "lr", [0, -1e-3], [1e-9]),
    (AdamWConfig, "optim", "weight_decay", [-0.1], [0.0]),
    (AdamWConfig, "optim", "beta1", [-0.1, 1.0], [0.0, 0.999]),
    (AdamWConfig, "optim", "beta2", [-0.1, 1.0], [0.0, 0.999]),
    (AdamWConfig, "optim", "eps", [0, -1e-8], [1e-12]),
    (DdpConfig, "parallel", "bucket_mb", [0, -1], [0.5]),
    (Fp16Config, "precision", "initial_scale", [0.5, 0], [1]),
    (Fp16Config, "precision", "growth_interval", [0], [1]),
    (LoopConfig, "train", "max_steps", [0, -1], [1, None]),
    (LoopConfig, "train", "max_epochs", [0, -0.5], [0.01, None]),
    (LoopConfig, "train", "max_grad_norm", [0, -1.0], [1e-3, None]),
    (LoopConfig, "train", "global_batch_size", [0, -1], [1]),
    (LoopConfig, "train", "micro_batch_size", [0], [1]),
    (LoopConfig, "train", "max_skipped_steps", [0], [1]),
    (EvalConfig, "eval", "every_steps", [-1], [0]),
    (EvalConfig, "eval", "max_sequences", [0], [1, None]),
    (CheckpointConfig, "checkpoint", "save_steps", [-1], [0]),
    (CheckpointConfig, "checkpoint", "save_total_limit", [0], [1]),
    (LoggingConfig, "logging", "every_steps", [0], [1]),
    (LaunchConfig, "launch", "default_ranks", [0], [1]),
    (LaunchConfig, "launch", "nproc_per_node", [0], [1, None]),
    (LaunchConfig, "launch", "nnodes", [0], [1, None]),
    (LaunchConfig, "launch", "rdzv_endpoint", ["a", ":1", "a:b", "a:0", "a:65536"], [None]),
    (LoggingConfig, "logging", "profile_steps", [-1], [0, 3]),
    (TorchrunConfig, "launch", "rdzv_endpoint", ["a:1"], [None]),
    (TorchrunConfig, "launch", "node_rank", [0], [None]),
    (LaunchConfig, "launch", "timeout_s", [0], [1]),
    (LaunchConfig, "launch", "prepare_timeout_s", [0], [1]),
    (ScheduleConfig, "schedule", "warmup_steps", [-1], [0]),
    (ScheduleConfig, "schedule", "warmup_ratio", [-0.1, 1.0], [0.0, 0.99]),
    (CosineConfig, "schedule", "min_lr_ratio", [-0.1, 1.1], [0.0, 1.0]),
    (PolynomialConfig, "schedule", "power", [0, -1], [0.5]),
]


@pytest.mark.parametrize(
    ("cls", "section", "field", "value"),
    [(cls, section, field, value) for cls, section, field, bad, _ in BOUNDS for value in bad],
)
def test_refused_with_field_value_and_mend(cls: type, section: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**{field: value})
    head, mend = str(caught.value).split("; ", 1)
    assert head.startswith(f"{section}.{field}={value} ")
    assert len(mend) > 5


@pytest.mark.parametrize(
    ("cls", "field", "value"), [(cls, field, value) for cls, _, field, _, good in BOUNDS for value in good]
)
def test_edges_are_accepted(cls: type, field: str, value: Any) -> None:
    assert getattr(cls(**{field: value}), field) == value


def refusal(cls: type, **fields: Any) -> str:
    """The message of a class that refuses its fields."""
    with pytest.raises(ConfigError) as caught:
        cls(**fields)
    return str(caught.value)


def test_pairs_that_exclude_each_other() -> None:
    said = refusal(DocumentsConfig, held_out=0.1, eval_path="b")
    assert "data.held_out=0.1 cannot be combined with data.eval_path=b" in said
    said = refusal(ScheduleConfig, warmup_steps=5, warmup_ratio=0.1)
    assert "schedule.warmup_ratio=0.1 cannot be combined with schedule.warmup_steps=5" in said


def test_several_nodes_need_an_endpoint_and_a_number_each() -> None:
    for endpoint in ("a:1", "[::1]:65535"):
        assert LaunchConfig(nnodes=1, rdzv_endpoint=endpoint).rdzv_endpoint == endpoint
        assert "launch.rdzv_endpoint=" in (said := refusal(LaunchConfig, rdzv_endpoint=endpoint))
        assert "has no effect without launch.nnodes; give launch.nnodes=N on every node" in said
    assert "launch.rdzv_endpoint=None must be set with launch.nnodes=2" in refusal(LaunchConfig, nnodes=2)
    for rank in (None, -1, 2):
        said = refusal(LaunchConfig, nnodes=2, rdzv_endpoint="a:1", node_rank=rank)
        assert f"launch.node_rank={rank} must be 0 to 1" in said
    assert LaunchConfig(nnodes=2, rdzv_endpoint="a:1", node_rank=1).node_rank == 1


def test_nodes_are_the_platforms_to_say() -> None:
    for cls in (SlurmConfig, ModelArtsConfig):
        assert cls(nnodes=2).nodes == 2
    assert LaunchConfig().nodes == 1


def test_an_endpoint_is_a_host_and_a_port() -> None:
    assert split_endpoint("node0:29500") == ("node0", 29500)
    assert split_endpoint("[fe80::1]:1") == ("fe80::1", 1)


def test_rope_fields_belong_to_types() -> None:
    assert "factor is set but model.rope_scaling.type is not" in refusal(RopeConfig, factor=2.0)
    assert "beta_fast=1.0 has no effect with model.rope_scaling.type=linear" in refusal(
        RopeConfig, type=RopeType.linear, factor=2.0, beta_fast=1.0
    )
    assert "theta is not set" in refusal(RopeConfig, type=RopeType.theta)
    for kind in (RopeType.linear, RopeType.dynamic, RopeType.yarn, RopeType.llama3):
        for factor in (None, 0.5):
            assert f"factor={factor} must be a number of at least 1" in refusal(RopeConfig, type=kind, factor=factor)
        assert RopeConfig(type=kind, factor=1.0).factor == 1.0
    assert RopeConfig(type=RopeType.theta, theta=1e6).theta == 1e6
