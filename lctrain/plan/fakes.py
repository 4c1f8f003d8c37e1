"""What torch and DeepSpeed need to be told so that a job runs on fake tensors, one function each, all undone.

Checked with torch 2.13 and DeepSpeed 0.19; tests/unit/plan/test_fakes.py fails when a name they use is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from lctrain.config.parallel import ParallelConfig, ZeroConfig


@contextmanager
def fake_groups(ranks: int) -> Iterator[None]:
    """Process groups of so many ranks that send nothing; this is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DeepSpeed asks the environment who it is.
    whoami = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = dict(os.environ)
    os.environ.update(whoami)
    try:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        for name in whoami:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in whoami if name in before})


@contextmanager
def meta_models() -> Iterator[None]:
    """Let accelerate make models on meta: in fake mode its parameters would stay where they began, on the CPU."""
    from lctrain.train import language

    original = language.build_meta

    def build_meta(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args, **kwargs)

    language.build_meta = build_meta  # type: ignore[assignment]
    try:
        yield
    finally:
        language.build_meta = original


@contextmanager
def movable_modules(fake: FakeTensorMode) -> Iterator[None]:
    """Let module.to() replace fake parameters: it refuses those that the mode's memo of conversions points to."""
    original = torch.utils.swap_tensors

    def swap(old: torch.Tensor, new: torch.Tensor) -> None:
        if old.untyped_storage()._cdata == new.untyped_storage()._cdata and old.stride() == new.stride():
            return  # where it was already
        fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        original(old, new)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


@contextmanager
def real_meshes() -> Iterator[None]:
    """FSDP2 over tensor parallel joins two meshes while it shards, and reads the rank numbers in them."""
    original = DeviceMesh._concatenate

    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return original(meshes)

    DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(original)  # type: ignore[method-assign]


@contextmanager
def alone_in_deepspeed(parallel: ParallelConfig) -> Iterator[None]:
    """Let DeepSpeed make its groups anew and forget them after, and ask nobody.

    ZeRO-3 compares with the other ranks which modules they run; here there are none to answer.
    """
    if not isinstance(parallel, ZeroConfig):
        yield
        return
    given = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import groups

    agree = coordinator.assert_ints_same_as_other_ranks
    kept = {name: value for name, value in vars(groups).items() if not callable(value) and not name.startswith("__")}
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    try:
        yield
    finally:
        coordinator.assert_ints_same_as_other_ranks = agree
        vars(groups).update(kept)
        comm.cdb = None
        # Processes that this one starts must choose for themselves.
        if given is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = given
