"""Fields checked against each other, and the arithmetic of ranks and batches."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lctrain.config.compose import compose_config
from lctrain.config.parallel import DdpConfig, FsdpConfig, FsdpSpConfig, HsdpConfig, ParallelConfig, SingleConfig
from lctrain.config.plain import from_plain, to_plain
from lctrain.config.registry import GROUPS
from lctrain.config.resolve import Resolved, layout_sizes, resolve
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError


@lru_cache
def plain_tiny(recipe: str = "llama_tiny_32k") -> dict[str, Any]:
    """The recipe, composed once."""
    return to_plain(compose_config([f"recipe={recipe}"]))


def config_of(*changes: str, recipe: str = "llama_tiny_32k") -> TrainConfig:
    """The recipe with changes like parallel=ddp (a whole group) and train.max_steps=3, and 24 and 12 to divide."""
    plain = copy.deepcopy(plain_tiny(recipe))
    plain["train"]["global_batch_size"] = 24
    plain["model"]["architecture"] |= {"num_attention_heads": 12, "num_key_value_heads": 12}
    for change in changes:
        key, value = change.split("=", 1)
        *parents, leaf = key.split(".")
        target = plain
        for parent in parents:
            target = target[parent]
        target[leaf] = {"kind": value} if key in GROUPS else yaml.safe_load(value)
    return from_plain(plain)


def resolved(*changes: str, world_size: int | None = None) -> Resolved:
    """A config of changes, resolved for our own ranks or those of torchrun."""
    return resolve(config_of(*changes), world_size=world_size, launcher="torchrun")


def refusal(*overrides: str, world_size: int | None = None) -> str:
    """The message of a config that does not resolve."""
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides, world_size=world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "overrides", "replicate", "shard", "sp"),
    [
        (1, "parallel=single", 1, 1, 1),
        (6, "parallel=ddp", 6, 1, 1),
        (6, "parallel=fsdp", 1, 6, 1),
        (1, "parallel=fsdp", 1, 1, 1),
        (6, "parallel=hsdp", 2, 3, 1),
        (6, "parallel=hsdp parallel.dp_replicate_size=3", 3, 2, 1),
        (6, "parallel=hsdp parallel.dp_replicate_size=-1 parallel.dp_shard_size=2", 3, 2, 1),
        (6, "parallel=hsdp parallel.dp_replicate_size=1", 1, 6, 1),
        (6, "parallel=fsdp_sp", 1, 1, 6),
        (6, "parallel=fsdp_sp parallel.sp_size=2", 1, 3, 2),
        (6, "parallel=fsdp_sp parallel.sp_size=1", 1, 6, 1),
    ],
)
def test_sizes(ranks: int, overrides: str, replicate: int, shard: int, sp: int) -> None:
    sizes = resolved(*overrides.split(), f"launch.nproc_per_node={ranks}").sizes
    assert (sizes.dp_replicate, sizes.dp_shard, sizes.sp) == (replicate, shard, sp)
    assert sizes.world == ranks
    assert sizes.data == replicate * shard
    assert sizes.shards == shard * sp


@st.composite
def layouts(draw: st.DrawFn) -> ParallelConfig:
    """Any layout, any sizes, most of which do not fit."""
    size = st.integers(-1, 9)
    return draw(
        st.one_of(
            st.just(DdpConfig()),
            st.just(FsdpConfig()),
            st.builds(HsdpConfig, dp_replicate_size=size, dp_shard_size=size),
            st.builds(FsdpSpConfig, sp_size=size),
        )
    )


@given(layouts(), st.integers(1, 64))
def test_sizes_multiply_out_or_are_refused(parallel: ParallelConfig, ranks: int) -> None:
    try:
        sizes = layout_sizes(parallel, ranks)
    except ConfigError as error:
        assert str(ranks) in str(error) or "cannot both be the rest" in str(error)  # noqa: PT017
        return
    assert sizes.world == ranks
    assert min(sizes.dp_replicate, sizes.dp_shard, sizes.sp) >= 1
    for field, value in (("dp_replicate_size", sizes.dp_replicate), ("sp_size", sizes.sp)):
        asked = getattr(parallel, field, -1)
        assert asked in (-1, value)


@given(st.integers(1, 64))
def test_defaults_of_every_layout_fit_any_ranks_or_say_so(ranks: int) -> None:
    for cls in GROUPS["parallel"]:
        if cls is SingleConfig or (cls is HsdpConfig and ranks % 2):
            continue
        assert layout_sizes(cls(), ranks).world == ranks, cls


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "parallel=fsdp_sp parallel.sp_size=4",
            "parallel.sp_size=4 does not divide the 6 ranks; choose one of 1, 2, 3, 6",
        ),
        ("parallel=fsdp_sp parallel.sp_size=0", "parallel.sp_size=0 does not divide the 6 ranks"),
        ("parallel=hsdp parallel.dp_replicate_size=4", "is not the 6 ranks; choose sizes from 1, 2, 3, 6"),
        ("parallel=hsdp parallel.dp_replicate_size=-1", "cannot both be the rest; set one of them"),
        (
            "parallel=fsdp_sp model.architecture.num_attention_heads=4",
            "parallel.sp_size=6 does not divide the model's 4 attention heads; with 6 ranks choose parallel.sp_size "
            "from 1, 2",
        ),
    ],
)
def test_sizes_that_do_not_fit(overrides: str, said: str) -> None:
    assert said in refusal(*overrides.split(), "launch.nproc_per_node=6")


def test_heads_are_read_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9}))
    overrides = ["parallel=fsdp_sp", f"model.path={tmp_path}", "launch.nproc_per_node=2"]
    assert "the model's 9 attention heads" in refusal(*overrides)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(*overrides)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refusal(*overrides)
    assert "is not a folder" in refusal(*overrides, f"model.path={tmp_path}/nowhere")


@pytest.mark.parametrize(
    ("overrides", "accumulation"),
    [
        ("parallel=single", 24),
        ("parallel=single train.micro_batch_size=8", 3),
        ("parallel=ddp launch.nproc_per_node=4", 6),
        ("parallel=ddp launch.nproc_per_node=4 train.micro_batch_size=3", 2),
        ("parallel=fsdp_sp launch.nproc_per_node=4", 24),
        ("parallel=fsdp_sp launch.nproc_per_node=4 parallel.sp_size=2 train.micro_batch_size=2", 6),
        ("parallel=hsdp launch.nproc_per_node=4", 6),
    ],
)
def test_accumulation_follows_from_the_batch(overrides: str, accumulation: int) -> None:
    assert resolved(*overrides.split()).accumulation == accumulation


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_batches_divide_or_the_near_ones_are_offered(total: int, micro: int, ranks: int) -> None:
    def attempt(batch: int) -> int:
        config = config_of("parallel=ddp", f"launch.nproc_per_node={ranks}", f"train.micro_batch_size={micro}")
        config.train.global_batch_size = batch
        return resolve(config).accumulation

    if total % (micro * ranks) == 0:
        assert attempt(total) * micro * ranks == total
        return
    with pytest.raises(ConfigError) as caught:
        attempt(total)
    text = str(caught.value)
    assert f"train.global_batch_size={total} is not a multiple of train.micro_batch_size={micro} x {ranks}" in text
    offered = text.split("set train.global_batch_size to ")[1].split(", or")[0].split(" or ")
    assert all(attempt(int(batch)) for batch in offered)


def test_missing_fields_are_named_together() -> None:
    config = config_of("train.max_epochs=null", "data.held_out=0", recipe="llama7b_32k")
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    text = str(caught.value)
    assert text.startswith("several fields:")
    for field in ("model.path is not set", "data.path is not set", "train.max_steps and train.max_epochs"):
        assert field in text
    assert "eval.every_steps=200 but there is nothing to evaluate on" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("model.init=pretrained", "model.path is not set: give the folder"),
        ("data.path=null", "data.path is not set: give a file or folder"),
        ("data=hub data.tokenizer=byte", "data.path is not set: give a data set name"),
        ("data.tokenizer=null", "data.tokenizer is not set and there is no model.path"),
        ("train.max_steps=null", "set one, e.g. train.max_epochs=1"),
        ("eval.every_steps=5 data.held_out=0", "eval.every_steps=5 but there is nothing to evaluate on"),
    ],
)
def test_each_missing_field_alone(overrides: str, said: str) -> None:
    text = refusal(*overrides.split())
    assert said in text
    assert "several fields" not in text


def test_an_architecture_or_a_path() -> None:
    assert "model.architecture is empty and model.path is not set" in refusal("model.architecture={}")


def test_ranks_of_our_own() -> None:
    assert resolved("parallel=fsdp").sizes.world == 2  # the recipe's
    assert resolved("parallel=single").sizes.world == 1  # whatever the recipe's
    nodes = ["launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=a:1"]
    both = resolved("parallel=fsdp", "launch.nproc_per_node=3", *nodes)
    assert both.sizes.world == 6
    assert resolved("parallel=fsdp", *nodes).sizes.world == 2
    said = refusal("parallel=fsdp", "launch.default_ranks=3", *nodes)
    assert "launch.default_ranks=3 does not divide over launch.nnodes=2" in said
    for overrides in (["launch.nproc_per_node=2"], nodes):
        assert "parallel=single runs one" in refusal("parallel=single", *overrides)


def test_ranks_of_another_launcher() -> None:
    assert resolved("parallel=fsdp", world_size=4).sizes.world == 4  # the recipe's 2 was only a default
    assert resolved("parallel=fsdp", "launch.nproc_per_node=4", world_size=4).sizes.world == 4
    assert "parallel=single runs one rank but torchrun started 4" in refusal("parallel=single", world_size=4)
    assert resolved("parallel=single", world_size=1).sizes.world == 1


def test_tensor_parallel_takes_no_fused_operators() -> None:
    assert resolved("parallel=fsdp", "model.npu_fused=true").sizes.world == 2
    said = refusal("parallel=fsdp_tp", "model.npu_fused=true")
    assert said.startswith("model.npu_fused=true does not work with parallel=fsdp_tp, ")
    assert said.endswith("; choose parallel=fsdp, fsdp_sp or fsdp_cp, or model.npu_fused=false")


def test_dense_scores_have_a_budget() -> None:
    fits = ["recipe=llama_tiny_32k", "model.attention=reference"]
    resolve(compose_config(fits))
    with pytest.raises(ConfigError, match=r"2\.5 GiB .* at data\.max_length=163840.*model\.attention=auto"):
        resolve(compose_config([*fits, "data.max_length=163840"]))
    resolve(compose_config(["recipe=llama_tiny_32k", "data.max_length=163840"]))
