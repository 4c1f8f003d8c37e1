"""The sum of a job's state, against sums by hand for a 7B model, and who is refused by it."""

from __future__ import annotations

from typing import Any

import pytest

from lctrain.config.resolve import Resolved, resolve
from lctrain.errors import DeviceError
from lctrain.train.memory_check import ModelCounts, check_memory, state_bytes
from tests.support.tiny import tiny_config

SEVEN_B = ModelCounts(parameters=7_000_000_000, trained=7_000_000_000, layers=32, width=4096)
GB = 10**9
GIB = 2**30


def job(*overrides: str, ranks: int = 8) -> Resolved:
    """A job on so many ranks."""
    return resolve(tiny_config("train.global_batch_size=8", *overrides), world_size=ranks)


@pytest.mark.parametrize(
    ("overrides", "device", "host"),
    [
        # fp32 weight, gradient and two moments: 16 bytes a parameter, on every rank or cut in 8.
        (["parallel=ddp"], 112.0, 0.0),
        (["parallel=fsdp"], 14.0, 0.0),
        (["parallel=fsdp_sp", "parallel.sp_size=4"], 14.0, 0.0),
        (["parallel=fsdp_tp", "parallel.tp_size=2"], 14.0, 0.0),
        (["parallel=hsdp", "parallel.dp_replicate_size=2"], 28.0, 0.0),
        (["parallel=fsdp", "parallel.offload_params=true"], 0.0, 14.0),
        # bf16 weight and gradient beside fp32 master and moments: 2 + 2 + 12, each whole or cut in 8.
        (["parallel=zero1", "precision=fp16"], 14.0 + 14.0 + 10.5, 0.0),
        # DeepSpeed's bf16 optimizer of stage 1 adds gradients up in whole fp32 ones.
        (["parallel=zero1", "precision=bf16"], 14.0 + 14.0 + 28.0 + 10.5, 0.0),
        (["parallel=zero2"], 14.0 + 1.75 + 10.5, 0.0),
        (["parallel=zero3"], 1.75 + 1.75 + 10.5, 0.0),
        (["parallel=zero3_sp", "parallel.sp_size=2"], 14.0, 0.0),
        (["parallel=zero3_offload"], 0.0, 14.0),
        (["parallel=zero3_offload", "parallel.offload_param=false"], 1.75, 12.25),
        (["parallel=zero3_offload", "parallel.offload_optimizer=false"], 12.25, 1.75),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_state_of_7b_on_eight_ranks(overrides: list[str], device: float, host: float) -> None:
    need = state_bytes(job(*overrides), SEVEN_B, compute_bytes=2)
    assert need.device / GB == pytest.approx(device)
    assert need.host / GB == pytest.approx(host)


def test_one_rank_keeps_everything() -> None:
    assert state_bytes(job("parallel=single", ranks=1), SEVEN_B, 4).device == 112 * GB


def test_frozen_parameters_are_their_weight_alone() -> None:
    adapters = ModelCounts(parameters=7_000_000_000, trained=40_000_000, layers=32, width=4096)
    need = state_bytes(job("parallel=fsdp"), adapters, 2)
    assert need.device == pytest.approx((40e6 * 16 + (7e9 - 40e6) * 4) / 8)


def test_offloaded_layer_inputs_are_host_memory() -> None:
    """32 layers x 32,768 tokens x 4,096 x 2 bytes: 8 GiB, less where a sequence is split."""
    long = ["memory=offload", "data.max_length=32768"]
    config = [*long, "train.micro_batch_size=1"]
    assert state_bytes(job("parallel=ddp", *config), SEVEN_B, 2).host == 8 * GIB
    assert state_bytes(job("parallel=fsdp_cp", *config), SEVEN_B, 2).host == 1 * GIB
    assert state_bytes(job("parallel=fsdp_sp", "parallel.sp_size=4", *config), SEVEN_B, 2).host == 2 * GIB
    twice = [*long, "train.micro_batch_size=2", "train.global_batch_size=16"]
    assert state_bytes(job("parallel=ddp", *twice), SEVEN_B, 2).host == 16 * GIB


def check(resolved: Resolved, **changes: Any) -> None:
    """check_memory on a device of 64 GB in a machine of 500 GB with eight of them."""
    given = {
        "compute_bytes": 2,
        "device_name": "Chip 9",
        "device_room": 64 * GB,
        "host_room": 500 * GB,
        "on_cpu": False,
        "ranks_here": 8,
    }
    check_memory(resolved, SEVEN_B, **(given | changes))


def test_a_device_that_cannot_hold_the_state_is_refused_with_the_mend() -> None:
    with pytest.raises(DeviceError) as refused:
        check(job("parallel=ddp"))
    message = str(refused.value)
    for part in ("7.00B parameters", "parallel=ddp", "104.3 GiB", "Chip 9 has 59.6 GiB", "parallel=fsdp", "lora.rank"):
        assert part in message
    check(job("parallel=fsdp"))
    check(job("parallel=ddp"), device_room=112 * GB)
    with pytest.raises(DeviceError):
        check(job("parallel=ddp"), device_room=112 * GB - 1)


def test_offload_counts_every_rank_of_the_host() -> None:
    """Eight ranks of 14 GB are 112 GB of host memory, whatever the devices have."""
    offloaded = job("parallel=fsdp", "parallel.offload_params=true")
    check(offloaded, device_room=1, host_room=112 * GB)
    with pytest.raises(DeviceError, match=r"13\.0 GiB of host memory.*8 ranks here, and this machine has 100\.0 GiB"):
        check(offloaded, host_room=100 * GIB)
    with pytest.raises(DeviceError, match=r"zero3_offload need 13\.0 GiB of host memory for what is offloaded a rank"):
        check(job("parallel=zero3_offload"), host_room=90 * GB)
    long = job("parallel=fsdp", "memory=offload", "data.max_length=32768")
    check(long, host_room=64 * GIB)
    with pytest.raises(DeviceError, match=r"8\.0 GiB of host memory for what is offloaded a rank.*memory=full"):
        check(long, host_room=64 * GIB - 1)


def test_on_the_cpu_both_are_one_memory() -> None:
    both = job("parallel=zero3_offload")  # 14 GB a rank
    check(both, on_cpu=True, device_room=1, host_room=112 * GB)
    with pytest.raises(DeviceError, match=r"13\.0 GiB of weights, gradients and optimizer state a rank, 8 ranks here"):
        check(both, on_cpu=True, device_room=112 * GB, host_room=112 * GB - 1)
    with pytest.raises(DeviceError, match="choose a smaller model"):
        check(job("parallel=single", ranks=1), on_cpu=True, ranks_here=1, host_room=100 * GB)
