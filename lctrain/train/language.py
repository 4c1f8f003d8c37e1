"""The language regime's parts: model, engine, objective and data of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lctrain.config.parallel import FsdpConfig
from lctrain.data.loader import TextLoader, eval_batches
from lctrain.data.order import SampleOrder
from lctrain.data.prepared import PreparedData
from lctrain.engines.base import Engine
from lctrain.engines.build import build_engine, give_memory
from lctrain.models.attention import AttentionRouter
from lctrain.models.build import set_first_weights
from lctrain.models.causal_lm import CausalLM, causal_flops, decoder_layers
from lctrain.models.materialize import materialize_empty
from lctrain.models.npu_fused import fuse
from lctrain.models.rope import verify_inv_freq
from lctrain.objectives.causal_lm import CausalLMObjective
from lctrain.ops.attention.interface import Kernel
from lctrain.ops.attention.select import select_kernel
from lctrain.ops.text_batch import TextBatch
from lctrain.parallel.apply import apply_layout, attention_for
from lctrain.runtime.device import acts_as
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.seed import weights_seed
from lctrain.train.callbacks.base import Callback
from lctrain.train.evaluate import evaluate
from lctrain.train.language_input import build_meta, check_fused, read_model
from lctrain.train.session import Session
from lctrain.train.weights import same_everywhere


@dataclass(frozen=True)
class Language:
    """model: the wrapped causal LM, laid out. hf_config: what it was built from."""

    session: Session
    mesh: Mesh
    model: CausalLM
    hf_config: Any
    engine: Engine
    objective: CausalLMObjective
    router: AttentionRouter

    def callbacks(self, run_dir: Path, data: object, order: SampleOrder) -> list[Callback]:
        """Nothing beyond what every regime has."""
        return []

    def evaluate(self, data: PreparedData, *, while_training: bool) -> dict[str, float]:
        """Loss and perplexity. A collective over all ranks."""
        return evaluate(self.engine, self.objective, self.eval_batches(data), self.mesh)

    def data_report(self, epochs: float) -> dict[str, Any]:
        """Nothing: token counts are in the metrics."""
        return {}

    def step_done(self, step: int) -> None:
        """Nothing follows a step."""

    def before_save(self) -> None:
        """Nothing precedes a checkpoint."""

    def first_step_done(self) -> None:
        """The layout's attention must have run in every layer: a library that swaps it would split documents.

        Raises RuntimeError.
        """
        layers = len(decoder_layers(self.model))
        if self.router.calls < layers:
            raise RuntimeError(
                f"attention ran {self.router.calls} times in a step of {layers} layers: the model does "
                "not call it through transformers' AttentionInterface"
            )

    def eval_batches(self, prepared: PreparedData) -> Iterator[TextBatch]:
        """This data rank's share of the validation sequences."""
        config = self.session.config
        return eval_batches(
            prepared,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.sizes.data,
            micro_batch_size=config.train.micro_batch_size,
            multiple=self.mesh.sizes.length_multiple,
            max_sequences=config.eval.max_sequences,
        )

    def loader(self, prepared: PreparedData, order: SampleOrder) -> TextLoader:
        """This data rank's training batches."""
        config = self.session.config
        return TextLoader(
            prepared,
            order=order,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.sizes.data,
            micro_batch_size=config.train.micro_batch_size,
            multiple=self.mesh.sizes.length_multiple,
            prefetch=config.data.prefetch,
        )


def build_language(
    session: Session, mesh: Mesh, *, init_weights: bool | None, kernel: Kernel | None = None
) -> Language:
    """Build on meta, lay out, give memory, then weights.

    init_weights: false when a checkpoint will bring them (adapters still need what they adapt), None when nothing
    will. kernel: attention's, in place of the one that suits the configuration and the device.
    Raises ModelError or ConfigError; RuntimeError when ranks end up with different weights.
    """
    config, log = session.config, session.log
    hf_config = read_model(session)
    model = build_meta(session, hf_config)
    check_fused(config.language_model, acts_as(mesh.device.torch_device))
    if config.language_model.npu_fused:
        log(f"fused: {fuse(model)}")
    asked = config.language_model.attention
    if kernel is None:
        kernel = select_kernel(asked, device_type=mesh.device.type, dtype=session.compute_dtype)
    router = model.route_attention(attention_for(kernel, config.parallel, mesh))
    log(f"attention: {kernel.name} ({'asked for' if asked.name != 'auto' else 'chosen'})")
    apply_layout(
        model,
        decoder_layers(model),
        parallel=config.parallel,
        memory=config.memory,
        mesh=mesh,
        compute_dtype=session.compute_dtype,
    )
    give_memory(model, session.resolved, mesh, session.compute_dtype, materialize_empty)
    verify_inv_freq(model, hf_config)
    # A checkpoint of adapters is not the whole model: what it adapts must be there first.
    if init_weights or (init_weights is not None and config.language_model.lora.rank is not None):
        _init(session, model)
    # FSDP2's policy casts by itself.
    autocast_dtype = None if isinstance(config.parallel, FsdpConfig) else session.compute_dtype
    engine = build_engine(model, session.resolved, mesh, autocast_dtype=autocast_dtype, report=log)
    objective = CausalLMObjective(mesh, partial(causal_flops, model))
    return Language(session, mesh, model, hf_config, engine, objective, router)


def _init(session: Session, model: CausalLM) -> None:
    digest = set_first_weights(model, session.config.language_model, seed=weights_seed(session.config.seed))
    if digest is not None:
        same_everywhere(digest)
        session.log(f"weights: random from seed {session.config.seed}, equal on every rank ({digest[:12]})")
