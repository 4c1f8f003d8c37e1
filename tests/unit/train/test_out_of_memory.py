"""What is said when memory runs out: only what this job can still do, cheapest first, and never a traceback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lctrain.config.compose import compose_config
from lctrain.config.resolve import Resolved, resolve
from lctrain.errors import DeviceError
from lctrain.runtime.device import Accelerator
from lctrain.runtime.process import Ranks
from lctrain.train.out_of_memory import explain, options
from tests.support.tiny import tiny_config

PLAN = "python -m lctrain plan recipe=llama_tiny_32k with these overrides says beforehand what fits"
MORE = "more devices (launch.nproc_per_node=N parallel"


def job(*overrides: str, ranks: int = 4) -> Resolved:
    """A language job on so many ranks."""
    return resolve(tiny_config("train.global_batch_size=8", *overrides), world_size=ranks)


@pytest.mark.parametrize(
    ("overrides", "ranks", "helps"),
    [
        (
            ["parallel=ddp", "train.micro_batch_size=2"],
            2,
            ["memory=full", "train.micro_batch_size=1", "parallel=fsdp", "parallel=fsdp_sp", "memory.tiled_mlp=4"],
        ),
        (["parallel=hsdp"], 4, ["memory=full", "parallel=fsdp", "parallel=fsdp_sp", "memory.tiled_mlp=4"]),
        (["parallel=zero2"], 4, ["memory=full", "parallel=zero3", "parallel=fsdp_sp", "memory.tiled_mlp=4"]),
        (["parallel=fsdp_sp", "parallel.sp_size=2", "memory=full"], 4, ["parallel.sp_size=4", "memory.tiled_mlp=4"]),
        (["parallel=fsdp_sp", "memory=full", "memory.tiled_mlp=2"], 4, []),
        (["parallel=fsdp_tp", "memory=offload"], 2, ["parallel=fsdp_sp"]),
        (
            ["parallel=fsdp_sp", "memory=full", "memory.tiled_mlp=2", "data.max_length=2048"],
            4,
            ["data.max_length=1024"],
        ),
        (["parallel=single"], 1, ["memory=full", "memory.tiled_mlp=4", f"{MORE}=fsdp_sp)"]),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_what_helps_on_a_machine_whose_memory_is_the_devices(
    overrides: list[str], ranks: int, helps: list[str]
) -> None:
    assert options(job(*overrides, ranks=ranks), host_is_free=False) == [*helps, PLAN]


def test_a_device_of_its_own_can_also_offload() -> None:
    helps = options(job("parallel=fsdp_sp", "memory=full", "memory.tiled_mlp=2"), host_is_free=True)
    assert helps == ["memory=offload", "parallel.offload_params=true", PLAN]


def test_a_micro_batch_shrinks_to_what_still_divides() -> None:
    wide = resolve(tiny_config("parallel=ddp", "train.global_batch_size=18", "train.micro_batch_size=9"), world_size=2)
    assert "train.micro_batch_size=3" in options(wide, host_is_free=False)


def test_what_is_proposed_can_run() -> None:
    # Four heads cannot be split over eight ranks, so eight-way Ulysses is not proposed.
    assert "parallel=fsdp_sp" not in options(job("parallel=fsdp", ranks=8), host_is_free=True)
    assert "parallel=fsdp_sp" in options(job("parallel=fsdp", ranks=4), host_is_free=True)


def test_images() -> None:
    config = compose_config(["recipe=lenet_fashion_mnist", "data.source=x", "train.global_batch_size=64"])
    config.train.micro_batch_size = 32
    helps = options(resolve(config, world_size=1), host_is_free=True)
    assert helps == [
        "train.micro_batch_size=16",
        f"{MORE}=fsdp)",
        PLAN.replace("llama_tiny_32k", "lenet_fashion_mnist"),
    ]


def session(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 3 of a job on a device that has used 6 GiB."""
    monkeypatch.setattr(Accelerator, "peak_memory_bytes", lambda self: 6 * 2**30)
    monkeypatch.setattr(Accelerator, "name", "Ascend910B3")
    return SimpleNamespace(device=Accelerator(kind, 0), ranks=Ranks(rank=3), resolved=job("parallel=fsdp_sp"))


@pytest.mark.parametrize(("kind", "memory"), [("npu", "memory on Ascend910B3"), ("cpu", "host memory")])
def test_one_message(kind: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 64.00 GiB total capacity")
    found = explain(error, session(kind, monkeypatch))
    assert isinstance(found, DeviceError)
    assert found.exit_code == 2
    assert str(found).startswith(
        f"rank 3 ran out of {memory}: 2.00 GiB could not be had, after at most 6.00 GiB in use; what helps, in this "
        "order: memory=full; "
    )
    assert ("offload" in str(found)) == (kind == "npu")


def test_other_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    known = explain(RuntimeError("EJ0001: Failed to initialize the HCCP process."), session("npu", monkeypatch))
    assert "a process still holds the card" in str(known)
    assert explain(RuntimeError("shapes differ"), session("npu", monkeypatch)) is None
