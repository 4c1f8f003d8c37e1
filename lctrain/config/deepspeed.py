"""The DeepSpeed configuration of a job: ours, a user's file and extra keys, without contradictions. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lctrain.config.parallel import Zero3OffloadConfig, ZeroConfig
from lctrain.config.precision import Bf16Config, Fp16Config, PrecisionConfig
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError

# What the trainer decides, and where it is set instead.
_OWNED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size (accumulation is derived)",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "optim=...",
    "scheduler": "schedule=...",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "amp": "precision=...",
    "sequence_parallel_size": "parallel=zero3_sp parallel.sp_size=...",
    "tensor_parallel": "parallel=fsdp_tp",
}


def deepspeed_json(config: TrainConfig, *, accumulation: int, ranks: int) -> dict[str, Any]:
    """The mapping deepspeed.initialize takes.

    Raises ConfigError for a file that cannot be read, keys the trainer owns in `extra`, and values of the
    file that contradict the job (equal ones and "auto" are fine).
    """
    parallel = config.parallel
    assert isinstance(parallel, ZeroConfig), type(parallel)
    ours = _ours(config, parallel, accumulation=accumulation, ranks=ranks)
    merged = _merge(ours, _read(parallel.deepspeed.config), source=f"{parallel.deepspeed.config}")
    for key in parallel.deepspeed.extra:
        if key in _OWNED:
            raise ConfigError(f"parallel.deepspeed.extra.{key} is the trainer's to decide; set {_OWNED[key]} instead")
    return _merge(merged, parallel.deepspeed.extra, source="parallel.deepspeed.extra")


def _ours(config: TrainConfig, parallel: ZeroConfig, *, accumulation: int, ranks: int) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": parallel.stage,
        "reduce_scatter": parallel.deepspeed.reduce_scatter,
        "overlap_comm": parallel.deepspeed.overlap_comm,
        "reduce_bucket_size": parallel.deepspeed.reduce_bucket_size,
        "contiguous_gradients": True,
    }
    if isinstance(parallel, Zero3OffloadConfig):
        if parallel.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if parallel.offload_param:
            zero["offload_param"] = {"device": "cpu"}
    micro = config.train.micro_batch_size
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        # DeepSpeed counts every rank as a data rank; sequence ranks only change what this number is called.
        "train_batch_size": micro * accumulation * ranks,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        **_precision(config.precision),
    }


def _precision(precision: PrecisionConfig) -> dict[str, Any]:
    match precision:
        case Bf16Config():
            return {"bf16": {"enabled": True, "check_grad_overflow": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        case Fp16Config():
            power = max(0, round(precision.initial_scale).bit_length() - 1)
            fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": power, "hysteresis": 1}
            return {"fp16": {**fp16, "loss_scale_window": precision.growth_interval}}
    return {}


def _read(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"parallel.deepspeed.config={path} does not exist; give a DeepSpeed JSON file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"parallel.deepspeed.config={path} cannot be read ({error}); give a JSON file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"parallel.deepspeed.config={path} is not a JSON object; give a DeepSpeed JSON file")
    return found


def _merge(ours: dict[str, Any], theirs: dict[str, Any], *, source: str, path: str = "") -> dict[str, Any]:
    """`theirs` added to `ours`; a key both have must agree, be "auto", or be off on their side."""
    merged = dict(ours)
    for key, value in theirs.items():
        where = f"{path}{key}"
        mine = ours.get(key)
        if isinstance(value, dict) and (isinstance(mine, dict) or key not in ours):
            if key in _OWNED and key not in ours:
                if value.get("enabled") not in (False, "auto"):
                    raise ConfigError(f"{source}: {where}={value} contradicts the job; set {_OWNED[key]} instead")
            else:
                merged[key] = _merge(mine or {}, value, source=source, path=f"{where}.")
        elif value == "auto" or (key in ours and value == mine):
            continue
        elif key in ours or key in _OWNED:
            owned = "parallel=zero1, zero2, zero3, ... and parallel.deepspeed.*"
            hint = _OWNED.get(where.split(".")[0], owned)
            raise ConfigError(f"{source}: {where}={value} contradicts the job's {mine}; remove it, or set {hint}")
        else:
            merged[key] = value
    return merged
