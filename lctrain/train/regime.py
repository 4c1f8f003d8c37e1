"""The two regimes, language and images, behind what the jobs need of either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lctrain.config.model import CausalLMConfig
from lctrain.data.order import SampleOrder
from lctrain.engines.base import Engine
from lctrain.objectives.base import Objective
from lctrain.runtime.mesh import Mesh

if TYPE_CHECKING:
    from pathlib import Path

    from lctrain.train.callbacks.base import Callback
    from lctrain.train.session import Session
    from lctrain.train.trainer import Batches


class Split(Protocol):
    """The samples of one split. key: names them in the cache. fingerprint: equal for equal samples in equal order."""

    @property
    def key(self) -> str:
        """What another rank opens."""

    @property
    def fingerprint(self) -> str:
        """What a checkpoint remembers."""

    def __len__(self) -> int: ...


class Input(Protocol):
    """What a regime checks and prepares before process groups exist.

    samples: what people call what is counted by train.global_batch_size. keeps_last: whether samples that do not
    fill the last step still make one.
    """

    samples: str
    keeps_last: bool

    def check(self) -> None:
        """Everything that can be refused without weights, data or other ranks."""

    def prepare(self, split: str) -> Split | None:
        """Make the split ready, on a node's first rank; None when there is no such data."""

    def open(self, key: str, split: str) -> Split:
        """What `prepare` made, on another rank."""

    def signature(self, data: Split) -> dict[str, Any]:
        """What makes two models the same model."""

    @property
    def size(self) -> str:
        """What a step consists of, for the log."""

    @property
    def notes(self) -> list[str]:
        """Further lines for the log."""


class Job(Protocol):
    """A regime's parts on one rank, built and laid out."""

    @property
    def engine(self) -> Engine:
        """Forward, backward and update."""

    @property
    def objective(self) -> Objective:
        """Loss and metrics."""

    def loader(self, data: Any, order: SampleOrder) -> Batches:
        """This data rank's training batches."""

    def data_report(self, epochs: float) -> dict[str, Any]:
        """What summary.json says of the data. epochs: trained by this process."""

    def callbacks(self, run_dir: Path, data: dict[str, Any], order: SampleOrder) -> list[Callback]:
        """What the main rank listens with in this regime. data: the splits by name."""

    def evaluate(self, data: Any, *, while_training: bool) -> dict[str, float]:
        """Metrics on a split. A collective over all ranks."""

    def first_step_done(self) -> None:
        """Checks after this process's first step."""

    def step_done(self, step: int) -> None:
        """After update `step` (from 1)."""

    def before_save(self) -> None:
        """Before tensors are written. A collective over all ranks."""


def input_of(session: Session) -> Input:
    """The regime's checks and data."""
    if isinstance(session.config.model, CausalLMConfig):
        from lctrain.train.language_input import LanguageInput

        return LanguageInput(session)
    from lctrain.train.image_input import ImageInput

    return ImageInput(session)


def build_job(session: Session, mesh: Mesh, data: Split, *, init_weights: bool) -> Job:
    """The regime's parts. init_weights: false when a checkpoint will bring them. A collective over all ranks."""
    if isinstance(session.config.model, CausalLMConfig):
        from lctrain.train.language import build_language

        return build_language(session, mesh, init_weights=init_weights)
    from lctrain.train.vision import build_vision

    return build_vision(session, mesh, data, init_weights=init_weights)
