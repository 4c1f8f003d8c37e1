"""Which model, how it is initialised, which attention kernel runs, how RoPE is extended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lctrain.config.checks import MISSING, require
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
    npu = "npu"
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
    """Base of every model."""

    kind: str = MISSING


@dataclass(kw_only=True)
class CausalLMConfig(ModelConfig):
    """A Hugging Face causal LM.

    path: a local folder with config.json (and safetensors when init=pretrained).
    architecture: a transformers config as a mapping with `model_type`; used when `path` is not set.
    npu_fused: compute RMSNorm, SwiGLU and the rotary embedding with Ascend's fused operators; device npu only.
    """

    kind: str = "causal_lm"
    path: str | None = None
    init: ModelInit = ModelInit.pretrained
    architecture: dict[str, Any] = field(default_factory=dict)
    attention: AttentionKernel = AttentionKernel.auto
    rope_scaling: RopeConfig = field(default_factory=RopeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    trust_remote_code: bool = False
    npu_fused: bool = False


class Stem(Enum):
    """imagenet: 7x7 convolution with stride 2 and max pooling; small: one 3x3 convolution, for images of 28-64 px."""

    imagenet = "imagenet"
    small = "small"


@dataclass(kw_only=True)
class ImageModelConfig(ModelConfig):
    """Base of image classifiers.

    path: a safetensors file with torchvision's names to start from; null starts from the seed.
    classes, channels: null takes them from the data.
    """

    path: str | None = None
    classes: int | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        for name in ("classes", "channels"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name}", value, "must be at least 1", "or null for the data's")


_THIN, _BASIC, _BOTTLENECK = (8, 20), (18, 34), (50, 101, 152)


@dataclass(kw_only=True)
class ResNetConfig(ImageModelConfig):
    """ResNet v1.5 (He et al. 2015, stride in the 3x3 convolution), channels last.

    depth: 18, 34, 50, 101, 152; or 8, 20 with three stages for 28-32 px images (width 16).
    stem: null takes imagenet, and small for the thin ones. width: channels of the first stage; null takes 64, or 16.
    zero_init_last_gamma: each block starts as the identity (Goyal et al. 2017). fc_std: standard deviation of the
    last layer's first weights; null keeps torch's.
    """

    kind: str = "resnet"
    depth: int = 50
    stem: Stem | None = None
    width: int | None = None
    zero_init_last_gamma: bool = True
    fc_std: float | None = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*_THIN, *_BASIC, *_BOTTLENECK)
        require(
            self.depth in known, "model.depth", self.depth, "is not a ResNet's", f"one of {', '.join(map(str, known))}"
        )
        require(self.width is None or self.width >= 1, "model.width", self.width, "must be at least 1", "e.g. 64")
        require(self.fc_std is None or self.fc_std > 0, "model.fc_std", self.fc_std, "must be positive", "e.g. 0.01")

    @property
    def thin(self) -> bool:
        """Three stages for small images."""
        return self.depth in _THIN


@dataclass(kw_only=True)
class LeNetConfig(ImageModelConfig):
    """LeNet-5's shape (LeCun et al. 1998) with ReLU and max pooling."""

    kind: str = "lenet"
