"""What `accelerate launch` says through the environment, checked against the Hydra config."""

from __future__ import annotations

from collections.abc import Mapping

from lctrain.config.parallel import FsdpConfig
from lctrain.config.root import TrainConfig
from lctrain.config.sizes import Sizes
from lctrain.errors import ConfigError


def _on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").strip().lower() in ("1", "true", "yes", "y", "on")


def check_accelerate(config: TrainConfig, sizes: Sizes, env: Mapping[str, str]) -> None:
    """Raise ConfigError, naming both values, when an accelerate config contradicts ours.

    `mixed_precision: no` is accelerate's default whether or not anybody wrote it, so it says nothing; any
    other value must be ours. Ranks are compared in config.resolve.
    """
    layout, precision = config.parallel.kind, config.precision.kind
    theirs = env.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if theirs not in ("no", "", precision):
        raise ConfigError(
            f"accelerate's mixed_precision={theirs} contradicts precision={precision}; set mixed_precision: 'no' in "
            f"the accelerate config, or precision={theirs if theirs in ('bf16', 'fp16') else 'bf16'} here"
        )
    stage, ours = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"), getattr(config.parallel, "stage", None)
    # Without a stage it names a DeepSpeed JSON of its own, which this program does not read.
    if _on(env, "ACCELERATE_USE_DEEPSPEED") and (stage is None or stage != str(ours)):
        raise ConfigError(
            f"accelerate's DeepSpeed (ZeRO stage {stage or 'of its own file'}) contradicts parallel={layout}; "
            "set distributed_type: MULTI_GPU or MULTI_NPU in the accelerate config, or zero_stage there and "
            "parallel=zero1, zero2 or zero3 here"
        )
    if _on(env, "ACCELERATE_USE_FSDP") and not isinstance(config.parallel, FsdpConfig):
        version = env.get("FSDP_VERSION", "1")
        raise ConfigError(
            f"accelerate's FSDP (version {version}) contradicts parallel={layout}; choose parallel=fsdp, hsdp or "
            "fsdp_sp, or distributed_type: MULTI_GPU or MULTI_NPU in the accelerate config"
        )
    if _on(env, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError(
            f"accelerate's Megatron-LM contradicts parallel={layout}; turn it off in the accelerate config"
        )
    for name, size in (("TP", sizes.tp), ("CP", sizes.cp), ("SP", sizes.sp)):
        value = env.get(f"PARALLELISM_CONFIG_{name}_SIZE")
        if value and int(value) > 1 and int(value) != size:
            raise ConfigError(
                f"accelerate's parallelism_config {name.lower()}_size={value} contradicts parallel={layout} "
                f"({name.lower()} {size}); remove parallelism_config and let parallel= decide"
            )
