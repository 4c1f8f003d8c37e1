"""The whole configuration of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lctrain.config.batch_norm import BatchNormConfig
from lctrain.config.checks import MISSING, require
from lctrain.config.classification import ClassificationConfig
from lctrain.config.data import DataConfig, DocumentsConfig
from lctrain.config.images import ImagesConfig
from lctrain.config.launch import LaunchConfig
from lctrain.config.memory import MemoryConfig
from lctrain.config.model import CausalLMConfig, ImageModelConfig, ModelConfig
from lctrain.config.optim import OptimConfig
from lctrain.config.parallel import ParallelConfig
from lctrain.config.plan import PlanConfig
from lctrain.config.precision import PrecisionConfig
from lctrain.config.schedule import ScheduleConfig


class Device(Enum):
    """Where the job runs; `auto` takes cuda, then npu, then cpu."""

    auto = "auto"
    cuda = "cuda"
    npu = "npu"
    cpu = "cpu"


@dataclass(kw_only=True)
class LoopConfig:
    """How long to train and how large a step is.

    max_steps or max_epochs: whichever comes first; at least one must be set.
    global_batch_size: sequences a step over all ranks; fixes the optimisation whatever the layout.
    micro_batch_size: sequences a forward pass on one data rank; only speed and memory depend on it.
    max_grad_norm: clip at this global norm; null is off.
    max_skipped_steps: this many non-finite steps in a row end the run.
    """

    max_steps: int | None = None
    max_epochs: float | None = None
    global_batch_size: int = 8
    micro_batch_size: int = 1
    max_grad_norm: float | None = 1.0
    max_skipped_steps: int = 20

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_epochs", "max_grad_norm"):
            value = getattr(self, name)
            require(value is None or value > 0, f"train.{name}", value, "must be positive", "or null for no limit")
        for name in ("global_batch_size", "micro_batch_size", "max_skipped_steps"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "must be at least 1", "give a whole number")


@dataclass(kw_only=True)
class EvalConfig:
    """Validation on what is held out: documents (data.held_out, data.eval_path) or images (data.eval_source).

    every_steps, every_epochs: one of the two; both 0 evaluate at the end only. max_sequences: the first so many
    sequences (or images); null means all.
    """

    every_steps: int = 0
    every_epochs: float = 0.0
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        require(
            self.every_steps >= 0,
            "eval.every_steps",
            self.every_steps,
            "must not be negative",
            "0 evaluates at the end only",
        )
        require(
            self.every_epochs >= 0,
            "eval.every_epochs",
            self.every_epochs,
            "must not be negative",
            "0 evaluates at the end only",
        )
        require(
            not (self.every_steps and self.every_epochs),
            "eval.every_epochs",
            self.every_epochs,
            f"cannot be combined with eval.every_steps={self.every_steps}",
            "keep one of the two",
        )
        require(
            self.max_sequences is None or self.max_sequences >= 1,
            "eval.max_sequences",
            self.max_sequences,
            "must be at least 1",
            "or null for all",
        )


@dataclass(kw_only=True)
class VerifyConfig:
    """How far the verify verb shrinks the job, and how near is equal.

    layers, max_length: the model keeps its widths and head counts, the data their packing. tolerance: largest
    relative difference in fp32; half_tolerance: in bf16 or fp16.
    """

    layers: int = 2
    max_length: int = 1024
    tolerance: float = 1e-4
    half_tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name in ("layers", "max_length", "tolerance", "half_tolerance"):
            value = getattr(self, name)
            require(value > 0, f"verify.{name}", value, "must be positive", "leave it out for the default")


@dataclass(kw_only=True)
class CheckpointConfig:
    """save_steps: 0 saves at the end and on preemption only.

    resume: a path (run directory or checkpoints/step-N), or `auto` for the last whole one of run_dir.
    """

    kind: str = "checkpoint"
    save_steps: int = 0
    save_total_limit: int = 2
    save_at_end: bool = True
    resume: str | None = None

    def __post_init__(self) -> None:
        require(
            self.save_steps >= 0,
            "checkpoint.save_steps",
            self.save_steps,
            "must not be negative",
            "0 saves at the end only",
        )
        require(
            self.save_total_limit >= 1,
            "checkpoint.save_total_limit",
            self.save_total_limit,
            "must be at least 1",
            "it is the number of checkpoints kept",
        )


@dataclass(kw_only=True)
class MlflowConfig:
    """One MLflow run a job. uri: a tracking server's address or a folder; null is off.

    per_rank: one run a rank instead, with that rank's own losses.
    """

    uri: str | None = None
    experiment: str = "lctrain"
    per_rank: bool = False

    def __post_init__(self) -> None:
        require(
            self.uri is not None or not self.per_rank,
            "logging.mlflow.per_rank",
            self.per_rank,
            "has no effect while logging.mlflow.uri is null",
            "give logging.mlflow.uri=FOLDER or a server's address",
        )


@dataclass(kw_only=True)
class LoggingConfig:
    """every_steps: steps between two records of metrics.jsonl.

    mlperf: write mlperf.log, an MLPerf training log (image recipes). pictures: loss and accuracy curves as PNG, and
    for image recipes a grid of training images. profile_steps: so many steps, after the first two, under the device's
    profiler; 0 is none.
    """

    kind: str = "logging"
    every_steps: int = 1
    tensorboard: bool = True
    progress: bool = True
    pictures: bool = False
    profile_steps: int = 0
    mlperf: bool = False
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)

    def __post_init__(self) -> None:
        require(
            self.every_steps >= 1, "logging.every_steps", self.every_steps, "must be at least 1", "1 logs every step"
        )
        require(
            self.profile_steps >= 0, "logging.profile_steps", self.profile_steps, "must not be negative", "0 is none"
        )


@dataclass(kw_only=True)
class TrainConfig:
    """The root. `recipe` is the name of the overlay that was chosen; groups with several classes must be chosen.

    preset: the name of the overlay with a batch's optimizer numbers, if one was chosen. deterministic: the same run
    gives the same bits again, or an operation that cannot ends it; slower.
    """

    recipe: str | None = None
    preset: str | None = None
    run_dir: str | None = None
    device: Device = Device.auto
    seed: int = 0
    deterministic: bool = False
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = MISSING
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    precision: PrecisionConfig = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    bn: BatchNormConfig = field(default_factory=BatchNormConfig)
    classification: ClassificationConfig = field(default_factory=ClassificationConfig)

    @property
    def language_model(self) -> CausalLMConfig:
        """`model`, where the regime is known to be language."""
        assert isinstance(self.model, CausalLMConfig), type(self.model)
        return self.model

    @property
    def documents(self) -> DocumentsConfig:
        """`data`, where the regime is known to be language."""
        assert isinstance(self.data, DocumentsConfig), type(self.data)
        return self.data

    @property
    def image_model(self) -> ImageModelConfig:
        """`model`, where the regime is known to be images."""
        assert isinstance(self.model, ImageModelConfig), type(self.model)
        return self.model

    @property
    def images(self) -> ImagesConfig:
        """`data`, where the regime is known to be images."""
        assert isinstance(self.data, ImagesConfig), type(self.data)
        return self.data
