"""What every job of ranks needs before its own work: device, checked input, data, groups, mesh."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lctrain.config.parallel import ZeroConfig
from lctrain.config.precision import Bf16Config, Fp16Config
from lctrain.config.resolve import Resolved, resolve
from lctrain.config.root import TrainConfig
from lctrain.engines.build import check_engine
from lctrain.errors import EXIT_PREEMPTED, DeviceError
from lctrain.runtime.device import Accelerator, choose, host_memory_bytes, wanted_type
from lctrain.runtime.environment import prepare_environment
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.overflow import overflow_flag
from lctrain.runtime.process import Ranks, say_first, start_groups
from lctrain.train.callbacks.build import check_logs
from lctrain.train.gate import abandon, first_on_node, share
from lctrain.train.log import Log
from lctrain.train.memory_check import ModelCounts, check_memory
from lctrain.train.regime import Input, input_of
from lctrain.train.stop import StopFlag

if TYPE_CHECKING:
    from torch.distributed import Store

_PREPARED = "prepared"


@dataclass
class Session:
    """One rank of a job, from its rank number to its mesh."""

    config: TrainConfig
    ranks: Ranks
    store: Store
    stop: StopFlag

    def __post_init__(self) -> None:
        self.began = time.time()
        self.resolved: Resolved = resolve(
            self.config, world_size=self.ranks.world_size, launcher=self.ranks.launcher or "lctrain"
        )
        self.log = Log(speaks=self.ranks.is_main)
        self.environment = prepare_environment(wanted_type(self.config.device), self.config.launch.timeout_s)
        self.device: Accelerator = choose(self.config.device, self.ranks.local_rank, self.ranks.local_world_size)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of forward and backward."""
        match self.config.precision:
            case Bf16Config():
                return torch.bfloat16
            case Fp16Config():
                return torch.float16
        return torch.float32

    @cached_property
    def input(self) -> Input:
        """What is special to this session's regime."""
        return input_of(self)

    def check(self) -> None:
        """Everything that can be refused without weights, data or other ranks."""
        if isinstance(self.config.precision, Bf16Config) and not self.device.supports_bf16():
            raise DeviceError(f"precision=bf16 but {self.device.name} has no bf16 arithmetic; use precision=fp16")
        if (
            isinstance(self.config.precision, Fp16Config)
            and isinstance(self.config.parallel, ZeroConfig)
            and overflow_flag(self.device) is not None
        ):
            raise DeviceError(
                f"precision=fp16 with parallel={self.config.parallel.kind} on {self.device.name}: there an fp16 "
                "overflow gives no infinity, and DeepSpeed looks for nothing else; choose parallel=fsdp, fsdp_sp or "
                "fsdp_cp"
            )
        check_engine(self.resolved)
        check_logs(self.config.logging)
        self.input.check()

    def check_memory(self, counts: ModelCounts) -> None:
        """Raise DeviceError when the state of a model of `counts` does not fit here."""
        check_memory(
            self.resolved,
            counts,
            compute_bytes=self.compute_dtype.itemsize,
            device_name=self.device.name,
            device_room=self.device.total_memory_bytes(),
            host_room=host_memory_bytes(),
            on_cpu=self.device.type == "cpu",
            ranks_here=self.ranks.local_world_size,
        )

    def prepare(self, splits: tuple[str, ...]) -> dict[str, Any]:
        """Check, then prepare on the node's first rank while the others wait; then open on every rank.

        Gives a split or None for each name. Raises what `check` and the regime's prepare raise, on the first rank;
        PeerFailed on the others. A signal to stop ends the process, see `leave_early`.
        """
        keys: dict[str, str] = {}

        def first() -> str:
            self.check()
            for split in splits:
                prepared = self.input.prepare(split)
                keys[split] = prepared.key if prepared else ""
            return ",".join(keys[s] for s in splits)

        with self.stop.at_once(self.leave_early):
            note = first_on_node(
                self.ranks, self.store, _PREPARED, first, lambda text: text, self.config.launch.prepare_timeout_s
            )
        return {
            split: self.input.open(key, split) if key else None
            for split, key in zip(splits, note.split(","), strict=True)
        }

    def leave_early(self) -> NoReturn:
        """End this process before it has made a step: nothing is lost that the same command does not make again."""
        with suppress(RuntimeError):  # the store is gone with the rank that hosts it
            abandon(self.ranks, self.store, _PREPARED)
        say_first(self.store, "stopped before the first step; the same command starts it again")
        os._exit(EXIT_PREEMPTED)

    def share(self, name: str, make: Callable[[], str]) -> str:
        """A string made by rank 0, on every rank."""
        return share(self.ranks, self.store, name, make)

    def connect(self) -> Mesh:
        """Create process groups and the mesh."""
        if self.config.deterministic:
            self.device.make_deterministic()
        self.device.activate()
        start_groups(self.ranks, self.store, self.device, self.config.launch.timeout_s)
        return Mesh(self.resolved.sizes, self.device)

    def describe(self) -> None:
        """Say what runs where."""
        sizes, train = self.resolved.sizes, self.config.train
        axes = ", ".join(f"{axis} {size}" for axis, size in vars(sizes).items() if size > 1) or "one rank"
        self.log(
            f"{self.config.recipe or 'run'}: parallel={self.config.parallel.kind} ({axes}) on {sizes.world} x "
            f"{self.device.name}, precision {self.config.precision.kind}, started by {self.ranks.launcher or 'hand'}"
        )
        self.log(
            f"batch: {train.global_batch_size:,} {self.input.size} a step = {train.micro_batch_size} x {sizes.data} "
            f"data ranks x {self.resolved.accumulation} micro-steps"
        )
        for line in self.input.notes:
            self.log(line)
        for line in self.environment.lines():
            self.log(line)
        launch = self.config.launch
        self.log(self.environment.timeouts(launch.timeout_s, launch.prepare_timeout_s))


def versions() -> dict[str, str]:
    """What ran, for summary.json."""
    from lctrain import __version__

    return {
        "lctrain": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
