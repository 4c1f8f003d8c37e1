"""One rank of a job, its own code from the model to the update, with nothing real in it.

Tensors are fake (shapes without values), process groups are torch's `fake` backend, and a Trace watches.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lctrain.config.hardware import Hardware
from lctrain.config.model import AttentionKernel, CausalLMConfig
from lctrain.config.parallel import FsdpConfig, Zero3OffloadConfig, ZeroConfig
from lctrain.config.resolve import Resolved
from lctrain.config.root import Device, TrainConfig
from lctrain.engines.native import NativeEngine
from lctrain.errors import DeviceError
from lctrain.ops.attention.interface import Kernel
from lctrain.ops.attention.npu import MASK_SIZE, NpuKernel
from lctrain.ops.attention.select import select_kernel
from lctrain.ops.shards import full_shape
from lctrain.parallel.offload import HostInputs
from lctrain.plan.cost import Operation
from lctrain.plan.fakes import alone_in_deepspeed, fake_groups, meta_models, movable_modules, real_meshes
from lctrain.plan.fused import planned_operators
from lctrain.plan.job import build, make_batch, run_step, without_data
from lctrain.plan.kernel import CountedKernel, PlannedKernel
from lctrain.plan.marks import HOST, mark_gradients, mark_state
from lctrain.plan.trace import Event, Trace
from lctrain.runtime.device import Accelerator, choose, planned
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
    images of one global batch; flops: of one global batch, without recomputation. on_host: categories that lie in
    host memory. traced_on: whose fake tensors they were, cpu or npu.
    """

    resolved: Resolved
    events: list[Event]
    operations: list[Operation]
    micro_steps: int
    parameters: int
    trained: int
    unit: str
    units: float
    flops: float
    on_host: frozenset[str]
    traced_on: str


def simulate(config: TrainConfig, hardware: Hardware, ranks: int) -> Simulation:
    """Trace rank 0 of `ranks`. The process must have no process group.

    Fake tensors are the CPU's, or an NPU's where that is planned for and one is here (unless device=cpu, or under
    DeepSpeed): then the attention is torch_npu's own operator.
    Raises ConfigError, ModelError; DeviceError when device=npu has none.
    """
    # DeepSpeed decides for itself, once a process, where its tensors are.
    on_npu = hardware.type == "npu" and not isinstance(config.parallel, ZeroConfig)
    accelerator = _npu_at_hand(config.device) if on_npu else None
    config = without_data(config, ranks)
    config.device = Device.cpu
    session = Session(config, Ranks(0, ranks, 0, ranks, "lctrain"), dist.HashStore(), StopFlag())
    session.log = lambda line: None  # type: ignore[assignment]
    session.device = accelerator or session.device
    session.device.recompute_here()
    with ExitStack() as stack:
        stack.enter_context(_hushed())
        stack.enter_context(fake_groups(ranks))
        stack.enter_context(planned(hardware.type))
        mesh = Mesh(session.resolved.sizes, session.device)
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for patch in (meta_models(), movable_modules(fake), real_meshes(), alone_in_deepspeed(config.parallel)):
            stack.enter_context(patch)
        trace = stack.enter_context(Trace())
        stack.enter_context(_host_inputs(hardware, trace))
        if session.device.type == "cpu":
            stack.enter_context(planned_operators(trace))
        kernel = CountedKernel(_kernel(session, hardware), trace) if _is_language(config) else None
        job, layers = build(session, mesh, kernel=kernel, real=False)
        if _is_language(config):
            words = job.hf_config.get_text_config().vocab_size
            trace.vocabulary = frozenset({words, words // session.resolved.sizes.tp})
        batch = make_batch(config)
        _follow(layers, trace)
        _make_optimizer_state(job, batch, trace)
        mark_state(job.engine, config, trace)
        trace.restart()
        micro_steps = min(session.resolved.accumulation, TRACED_MICRO_STEPS)
        run_step(job, batch, micro_steps, trace.enter, lambda: mark_gradients(job.engine, trace))
        events = list(trace.events)  # before the job is taken apart
        work = job.objective.work(batch)
    copies = session.resolved.sizes.data * session.resolved.accumulation
    shapes = [(_whole_size(p), p.requires_grad) for p in job.engine.module.parameters()]
    return Simulation(
        resolved=session.resolved,
        events=events,
        operations=trace.operations,
        micro_steps=micro_steps,
        parameters=sum(size for size, _ in shapes),
        trained=sum(size for size, trains in shapes if trains),
        unit=job.objective.unit,
        units=work.units * copies,
        flops=work.flops * copies,
        on_host=_on_host(config, hardware),
        traced_on=session.device.type,
    )


def _npu_at_hand(device: Device) -> Accelerator | None:
    """The first card, if fake tensors are to be its. Raises DeviceError when it is asked for and there is none."""
    if device in (Device.cpu, Device.cuda):
        return None
    try:
        return choose(Device.npu, 0, 1)
    except (DeviceError, RuntimeError, AssertionError):
        # A card that is held, or a driver that fails: a plan needs neither.
        if device is Device.npu:
            raise
        return None


@contextmanager
def _hushed() -> Iterator[None]:
    """Without libraries' remarks on a job that does not run."""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _is_language(config: TrainConfig) -> bool:
    return isinstance(config.model, CausalLMConfig)


def _whole_size(parameter: torch.Tensor) -> int:
    """Numbers of a parameter, however it is split."""
    return int(full_shape(parameter).numel())


def _kernel(session: Session, hardware: Hardware) -> Kernel:
    asked = session.config.language_model.attention
    if hardware.type == "cpu" or asked is AttentionKernel.reference:
        return select_kernel(asked, device_type=session.device.type, dtype=session.compute_dtype)
    if session.device.type == "npu":
        return NpuKernel()
    return PlannedKernel(statistics=hardware.softmax_statistics, mask_size=MASK_SIZE if hardware.type == "npu" else 0)


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


def _make_optimizer_state(job: Any, batch: Any, trace: Trace) -> None:
    """What a first step leaves behind. Below DeepSpeed, without the step."""
    engine = job.engine
    if not isinstance(engine, NativeEngine):
        run_step(job, batch, 1, trace.enter)
        return
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    engine.step(0.0)


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

    HostInputs._out, HostInputs._fetch = marked_out, copied_back  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        HostInputs._out, HostInputs._fetch = out, fetch  # type: ignore[method-assign]


def _on_host(config: TrainConfig, hardware: Hardware) -> frozenset[str]:
    """Categories that the layout keeps in host memory; on a CPU that is the same memory."""
    parallel = config.parallel
    if hardware.type == "cpu":
        return frozenset({HOST})
    host = {HOST}
    if isinstance(parallel, FsdpConfig) and parallel.offload_params:
        host |= {"parameters", "master_weights", "gradients", "optimizer_state"}
    if isinstance(parallel, Zero3OffloadConfig):
        host |= {"master_weights", "gradients", "optimizer_state"} if parallel.offload_optimizer else set()
        host |= {"parameters"} if parallel.offload_param else set()
    return frozenset(host)
