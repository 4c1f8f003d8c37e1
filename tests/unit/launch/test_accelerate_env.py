"""What accelerate's config says against ours: refused with both values named, or let pass."""

from __future__ import annotations

from functools import lru_cache

import pytest

from lctrain.config.plain import from_plain, to_plain
from lctrain.config.root import TrainConfig
from lctrain.config.sizes import layout_sizes
from lctrain.errors import ConfigError
from lctrain.launch.accelerate_env import check_accelerate

ON = {"ACCELERATE_MIXED_PRECISION": "no"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@lru_cache
def plain_tiny() -> dict:
    """The demo's recipe, composed once."""
    from lctrain.config.compose import compose_config

    return to_plain(compose_config(["recipe=llama_tiny_32k"]))


def config_of(parallel: str = "fsdp", precision: str = "fp32", **fields: object) -> TrainConfig:
    """The demo's recipe under another layout and precision."""
    return from_plain({**plain_tiny(), "parallel": {"kind": parallel, **fields}, "precision": {"kind": precision}})


def check(config: TrainConfig, env: dict[str, str]) -> None:
    """As the command line does it, on four ranks (one for parallel=single)."""
    ranks = 1 if config.parallel.kind == "single" else 4
    check_accelerate(config, layout_sizes(config.parallel, ranks), {**ON, **env})


@pytest.mark.parametrize(
    ("env", "layout", "precision", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "fsdp", "fp32", "mixed_precision=bf16 contradicts precision=fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fsdp", "bf16", "mixed_precision=fp16 contradicts precision=bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "fsdp", "bf16", "mixed_precision=fp8 contradicts precision=bf16"),
        (FSDP, "ddp", "fp32", "FSDP (version 2) contradicts parallel=ddp"),
        (FSDP, "single", "fp32", "FSDP (version 2) contradicts parallel=single"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "fsdp",
            "fp32",
            "DeepSpeed (ZeRO stage 3) contradicts parallel=fsdp",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "fsdp", "fp32", "Megatron-LM contradicts parallel=fsdp"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "fsdp", "fp32", "tp_size=2 contradicts parallel=fsdp (tp 1)"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "4"}, "fsdp_sp", "fp32", "cp_size=4 contradicts parallel=fsdp_sp (cp 1)"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, "fsdp", "fp32", "sp_size=2 contradicts parallel=fsdp (sp 1)"),
    ],
)
def test_a_contradiction_names_both_values(env: dict[str, str], layout: str, precision: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config_of(layout, precision), env)
    text = str(caught.value)
    assert said in text
    assert "; " in text  # and the mend


@pytest.mark.parametrize(
    ("env", "layout", "precision"),
    [
        ({}, "fsdp", "bf16"),  # accelerate's default `no` says nothing
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "ddp", "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "ddp", "fp16"),
        (FSDP, "fsdp", "fp32"),
        (FSDP, "hsdp", "fp32"),
        (FSDP, "fsdp_sp", "fp32"),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}, "ddp", "fp32"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "1", "PARALLELISM_CONFIG_SP_SIZE": "1"}, "fsdp", "fp32"),
    ],
)
def test_what_agrees_passes(env: dict[str, str], layout: str, precision: str) -> None:
    check(config_of(layout, precision), env)


def test_sizes_are_compared_with_what_the_layout_resolves_to() -> None:
    env = {"PARALLELISM_CONFIG_SP_SIZE": "4"}
    check(config_of("fsdp_sp"), env)  # -1 is all four
    check(config_of("fsdp_sp", sp_size=4), env)
    check(config_of("fsdp_cp"), {"PARALLELISM_CONFIG_CP_SIZE": "4"})
    check(config_of("fsdp_tp", tp_size=2), {"PARALLELISM_CONFIG_TP_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"sp_size=4 contradicts parallel=fsdp_sp \(sp 2\)"):
        check(config_of("fsdp_sp", sp_size=2), env)


def test_deepspeed_agrees_with_the_layout_of_its_stage_only() -> None:
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    check(config_of("zero2"), {**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"})
    check(config_of("zero3_sp"), {**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})
    with pytest.raises(ConfigError, match=r"ZeRO stage 3\) contradicts parallel=zero2"):
        check(config_of("zero2"), {**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})
    with pytest.raises(ConfigError, match=r"ZeRO stage of its own file\) contradicts parallel=zero2"):
        check(config_of("zero2"), {**deepspeed, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"})
