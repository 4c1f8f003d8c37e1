"""Which model, how it is initialised, which attention kernel runs, how RoPE is extended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lctrain.errors import ConfigError


class ModelInit(Enum):
    """Where the first weights come from."""

    pretrained = "pretrained"
    random = "random"


class AttentionKernel(Enum):
    """Which kernel computes attention; `auto` picks the fastest that runs and prints it."""

    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    flash3 = "flash3"
    flex = "flex"
    reference = "reference"


class RopeType(Enum):
    """How rotary position embeddings are extended (transformers' names; `theta` changes the base)."""

    linear = "linear"
    dynamic = "dynamic"
    yarn = "yarn"
    llama3 = "llama3"
    theta = "theta"


@dataclass(kw_only=True)
class RopeConfig:
    """RoPE extension; `type: null` keeps what the model has. Unset factors take the type's default."""

    type: RopeType | None = None
    factor: float | None = None
    theta: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        given = {k for k, v in vars(self).items() if k != "type" and v is not None}
        if self.type is None:
            if given:
                raise ConfigError(
                    f"model.rope_scaling.{sorted(given)[0]} is set but model.rope_scaling.type is not; "
                    f"set model.rope_scaling.type to one of {', '.join(t.name for t in RopeType)}"
                )
            return
        allowed = ROPE_FIELDS[self.type]
        for name in sorted(given - allowed):
            raise ConfigError(
                f"model.rope_scaling.{name}={getattr(self, name)} has no effect with "
                f"model.rope_scaling.type={self.type.name}; that type reads {', '.join(sorted(allowed))}"
            )
        if self.type is RopeType.theta and self.theta is None:
            raise ConfigError("model.rope_scaling.theta is not set; type=theta needs the new base, e.g. 1000000")
        if self.type is not RopeType.theta and (self.factor is None or self.factor < 1):
            raise ConfigError(
                f"model.rope_scaling.factor={self.factor} must be a number of at least 1 with "
                f"type={self.type.name}: wanted positions divided by the positions the model was trained on"
            )


_COMMON = {"factor", "theta", "original_max_position_embeddings"}
ROPE_FIELDS = {
    RopeType.linear: {"factor", "theta"},
    RopeType.dynamic: {"factor", "theta", "original_max_position_embeddings"},
    RopeType.yarn: _COMMON | {"attention_factor", "beta_fast", "beta_slow"},
    RopeType.llama3: _COMMON | {"low_freq_factor", "high_freq_factor"},
    RopeType.theta: {"theta"},
}


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al., arXiv:2106.09685) on linear layers of the decoder; `rank: null` is off.

    Only adapters train and are saved; export merges them. target_modules: names of linear layers, empty for
    all of them in decoder layers.
    """

    rank: int | None = None
    alpha: float = 16.0
    target_modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"model.lora.rank={self.rank} must be at least 1; e.g. 16, or null for full fine-tuning")
        if self.alpha <= 0:
            raise ConfigError(f"model.lora.alpha={self.alpha} must be positive; adapters are scaled by alpha / rank")


@dataclass(kw_only=True)
class ModelConfig:
    """A Hugging Face causal LM.

    path: a local folder with config.json (and safetensors when init=pretrained).
    architecture: a transformers config as a mapping with `model_type`; used when `path` is not set.
    """

    kind: str = "causal_lm"
    path: str | None = None
    init: ModelInit = ModelInit.pretrained
    architecture: dict[str, Any] = field(default_factory=dict)
    attention: AttentionKernel = AttentionKernel.auto
    rope_scaling: RopeConfig = field(default_factory=RopeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    trust_remote_code: bool = False
