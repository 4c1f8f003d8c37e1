"""One rank of a job, its own code from the model to the update, with nothing real in it.

Tensors are fake (shapes without values), process groups are torch's `fake` backend, and a Trace watches. What is
traced is the second step: the optimizer's state exists by then.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from lctrain.config.hardware import Hardware
from lctrain.config.images import ImagesConfig
from lctrain.config.model import AttentionKernel, CausalLMConfig, ModelInit
from lctrain.config.parallel import FsdpConfig, ParallelConfig, Zero3Config
from lctrain.config.precision import Fp32Config
from lctrain.config.resolve import Resolved
from lctrain.config.root import Device, TrainConfig
from lctrain.data.order import SampleOrder
from lctrain.engines.native import NativeEngine
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Kernel
from lctrain.ops.attention.select import select_kernel
from lctrain.ops.image_batch import ImageBatch
from lctrain.ops.text_batch import TextBatch
from lctrain.parallel.offload import HostInputs
from lctrain.plan.cost import Operation
from lctrain.plan.kernel import CountedKernel, PlannedKernel
from lctrain.plan.memory import HOST
from lctrain.plan.trace import Event, Trace
from lctrain.runtime.device import planned
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.process import Ranks
from lctrain.train.session import Session
from lctrain.train.stop import StopFlag

TRACED_MICRO_STEPS = 2
"""The first of a step and the last: those between are like the first."""


@dataclass(frozen=True)
class Simulation:
    """What one traced step did.

    micro_steps: how many of them were traced. parameters, trained: numbers of the whole model. units: tokens or
    images of one global batch; flops: of one global batch, without recomputation.
    """

    resolved: Resolved
    events: list[Event]
    operations: list[Operation]
    micro_steps: int
    parameters: int
    trained: int
    layers: int
    width: int
    unit: str
    units: float
    flops: float
    on_host: frozenset[str]


@dataclass(frozen=True)
class _Stub:
    """What a plan knows of images it does not read."""

    class _Manifest:
        def __init__(self, classes: int, channels: int) -> None:
            self.classes, self.channels = [""] * classes, channels

    manifest: _Manifest


ASSUMED_CLASSES = 1000


def simulate(config: TrainConfig, hardware: Hardware, ranks: int) -> Simulation:
    """Trace rank 0 of `ranks`. The process must have no process group. Raises ConfigError, ModelError."""
    config = without_data(config)
    session = Session(config, Ranks(0, ranks, 0, ranks, "lctrain"), dist.HashStore(), StopFlag())
    session.log = lambda line: None  # type: ignore[assignment]
    with ExitStack() as stack:
        stack.enter_context(_fake_groups(ranks))
        stack.enter_context(planned(hardware.type))
        mesh = Mesh(session.resolved.sizes, session.device)
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_movable_modules(fake))
        stack.enter_context(_agreeing_ranks(config.parallel))
        trace = stack.enter_context(Trace())
        stack.enter_context(_host_inputs(hardware, trace))
        job, layers = _build(session, mesh, hardware, trace)
        batch = _batch(config)
        _follow(layers, trace)
        _make_optimizer_state(job, batch, trace)
        _mark(job, config, trace)
        trace.restart()
        micro_steps = min(session.resolved.accumulation, TRACED_MICRO_STEPS)
        _steps(job, batch, micro_steps, trace)
        work = job.objective.work(batch)
    copies = session.resolved.sizes.data * session.resolved.accumulation
    counted = _counts(job, config)
    return Simulation(
        session.resolved, trace.events, trace.operations, micro_steps, *counted, len(layers), _width(job, config),
        job.objective.unit, work.units * copies, work.flops * copies, _on_host(config, hardware),
    )  # fmt: skip


def without_data(config: TrainConfig) -> TrainConfig:
    """The job without what a plan does not read: data, tokenizer and weights."""
    config = copy.deepcopy(config)
    config.device = Device.cpu
    if isinstance(config.model, CausalLMConfig):
        config.model.init = ModelInit.random
        config.documents.path = config.documents.path or "unread"
        config.documents.tokenizer = config.documents.tokenizer or "byte"
        config.eval.every_steps = 0
        config.eval.every_epochs = 0
    else:
        config.images.source = config.images.source or "unread"
        config.image_model.path = None
    config.train.max_steps = config.train.max_steps or 1
    return config


@contextmanager
def _fake_groups(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DeepSpeed asks the environment who it is.
    whoami = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = dict(os.environ)
    os.environ.update(whoami)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name in whoami:
            os.environ.pop(name)
        os.environ.update(before)


def _build(session: Session, mesh: Mesh, hardware: Hardware, trace: Trace) -> tuple[Any, list[nn.Module]]:
    """The regime's job, and its layers in order."""
    if isinstance(session.config.model, CausalLMConfig):
        from lctrain.models.causal_lm import decoder_layers
        from lctrain.train.language import build_language

        kernel = CountedKernel(_kernel(session, hardware), trace)
        language = build_language(session, mesh, init_weights=None, kernel=kernel)
        return language, decoder_layers(language.model)
    from lctrain.train.vision import build_vision

    images = session.config.images
    stub = _Stub(_Stub._Manifest(ASSUMED_CLASSES, len(images.mean)))
    vision = build_vision(session, mesh, stub, init_weights=False)
    return vision, list(vision.model.stages)


def _kernel(session: Session, hardware: Hardware) -> Kernel:
    asked = session.config.language_model.attention
    if hardware.type == "cpu" or asked is AttentionKernel.reference:
        return select_kernel(asked, device_type="cpu", dtype=session.compute_dtype)
    return PlannedKernel(statistics=hardware.softmax_statistics)


def _batch(config: TrainConfig) -> Any:
    """A micro-batch of one document a sequence, or of images."""
    rows = config.train.micro_batch_size
    if isinstance(config.data, ImagesConfig):
        size, channels = config.images.image_size, len(config.images.mean)
        images = torch.zeros(rows, size, size, channels, dtype=torch.uint8)
        return ImageBatch(images, torch.zeros(rows, dtype=torch.long), rows)
    length = config.documents.max_length
    ids = [torch.zeros(rows, length, dtype=torch.long) for _ in range(3)]
    return TextBatch(*ids, Documents.from_lengths([length] * rows), rows * length, rows * length)


def _follow(layers: list[nn.Module], trace: Trace) -> None:
    """Tell the trace which layer is at work, forward and backward."""

    def forward(index: int) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any, kwargs: Any = None) -> None:
            if trace.phase.startswith("forward"):
                trace.place = f"{trace.phase}, layer {index + 1} of {len(layers)}"

        return enter

    def backward(index: int) -> Callable[..., None]:
        def enter(grad: torch.Tensor) -> None:
            trace.place = f"{trace.phase}, layer {index + 1} of {len(layers)}"

        def leave(module: nn.Module, inputs: Any, out: Any) -> None:
            states = out[0] if isinstance(out, tuple) else out
            if states.requires_grad:
                states.register_hook(enter)

        return leave

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(forward(index))
        layer.register_forward_hook(backward(index))


def _steps(job: Any, batch: Any, micro_steps: int, trace: Trace) -> None:
    """A step as the trainer runs it (train/step.py), without the values it would read."""
    engine, objective = job.engine, job.objective
    for index in range(micro_steps):
        with engine.microstep(last=index == micro_steps - 1):
            trace.enter(f"forward {index + 1}")
            loss = objective.loss_sum(engine.model, objective.shard(batch))
            trace.enter(f"backward {index + 1}")
            engine.backward(loss / 1.0)
            del loss
        _mark_gradients(engine, trace)
    trace.enter("optimizer")
    engine.step(0.0)
    if getattr(job, "ema", None) is not None:
        job.step_done(1)


def _make_optimizer_state(job: Any, batch: Any, trace: Trace) -> None:
    """What a first step leaves behind."""
    engine = job.engine
    if not isinstance(engine, NativeEngine):
        _steps(job, batch, 1, trace)
        return
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    engine.step(0.0)


def _mark_gradients(engine: Any, trace: Trace) -> None:
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            trace.mark(parameter.grad, "gradients")


def _mark(job: Any, config: TrainConfig, trace: Trace) -> None:
    """Say what the tensors are that stay from step to step."""
    engine = job.engine
    half = not isinstance(config.precision, Fp32Config)
    for parameter in engine.module.parameters():
        trace.mark(parameter, "master_weights" if half and parameter.dtype == torch.float32 else "parameters")
    for buffer in engine.module.buffers():
        trace.mark(buffer, "parameters")
    for state in engine.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                trace.mark(value, "optimizer_state")
    for companion in getattr(engine, "companions", {}).values():
        trace.mark(companion, "optimizer_state")


def _on_host(config: TrainConfig, hardware: Hardware) -> frozenset[str]:
    """Categories that the layout keeps in host memory; on a CPU that is the same memory."""
    parallel = config.parallel
    if hardware.type == "cpu" or not isinstance(parallel, FsdpConfig) or not parallel.offload_params:
        return frozenset({HOST})
    return frozenset({HOST, "parameters", "master_weights", "gradients", "optimizer_state"})


@contextmanager
def _agreeing_ranks(parallel: ParallelConfig) -> Iterator[None]:
    """ZeRO-3 asks the other ranks whether they run the same modules; here nobody answers."""
    if not isinstance(parallel, Zero3Config):
        yield
        return
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    original = coordinator.assert_ints_same_as_other_ranks
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    try:
        yield
    finally:
        coordinator.assert_ints_same_as_other_ranks = original


@contextmanager
def _movable_modules(fake: FakeTensorMode) -> Iterator[None]:
    """Let module.to() replace fake parameters: it refuses those that the mode's memo of conversions points to."""
    original = torch.utils.swap_tensors

    def swap(old: torch.Tensor, new: torch.Tensor) -> None:
        fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        original(old, new)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


@contextmanager
def _host_inputs(hardware: Hardware, trace: Trace) -> Iterator[None]:
    """Layer inputs that leave an accelerator (parallel/offload.py) are clones here: say which lie where."""
    if hardware.type == "cpu":
        yield
        return
    out, fetch = HostInputs._out, HostInputs._fetch

    def marked_out(inputs: HostInputs, x: torch.Tensor) -> Any:
        moved = out(inputs, x)
        trace.mark(moved.host, HOST)
        return moved

    def copied_back(inputs: HostInputs, moved: Any) -> None:
        moved.device_copy = moved.host.clone()

    HostInputs._out, HostInputs._fetch = marked_out, copied_back  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostInputs._out, HostInputs._fetch = out, fetch  # type: ignore[method-assign]


def _counts(job: Any, config: TrainConfig) -> tuple[int, int]:
    """Parameters of the whole model, and those that train."""
    whole = [(p.shape.numel(), p.requires_grad) for p in job.engine.module.parameters()]
    return sum(n for n, _ in whole), sum(n for n, trains in whole if trains)


def _width(job: Any, config: TrainConfig) -> int:
    if isinstance(config.model, CausalLMConfig):
        return int(job.hf_config.get_text_config().hidden_size)
    return 0
