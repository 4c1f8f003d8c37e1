"""What a device says when it fails, as users have reported it, and what they are told."""

from __future__ import annotations

import pytest
import torch

from lctrain.runtime.failures import known_failure, out_of_memory

BUSY = """[ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64
[ERROR] 2024-05-21-11:57:54 (PID:1, Device:3, RankID:3) ERR02200 DIST call hccl api failed.
EJ0001: 2024-05-21-11:57:54.167.645 Failed to initialize the HCCP process."""
LATE = "HCCL function error: HcclAllreduce, error code is 6\n[PID: 749] Get_Socket_Timeout(EI0006): Getting socket"
STUCK = "EI0002: [PID: 2969] The wait execution of the Notify register times out."


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        (BUSY, {}, "EJ0001: a process still holds the card"),
        (BUSY, {}, "wait ten seconds and start again; if it stays, npu-smi info lists"),
        (LATE, {"HCCL_CONNECT_TIMEOUT": "600"}, "EI0006: ranks did not meet within HCCL_CONNECT_TIMEOUT=600 s"),
        (LATE, {}, "HCCL_CONNECT_TIMEOUT=its default s; look for an earlier error of another rank"),
        (STUCK, {"HCCL_EXEC_TIMEOUT": "1768"}, "EI0002: a rank waited in a collective for HCCL_EXEC_TIMEOUT=1768 s"),
    ],
)
def test_codes_of_cann(text: str, env: dict[str, str], said: str) -> None:
    found = known_failure(RuntimeError(text), env)
    assert found is not None
    assert said in str(found)
    assert "\n" not in str(found)
    assert found.exit_code == 2


def test_other_failures_are_not_explained() -> None:
    assert known_failure(RuntimeError("shapes differ")) is None
    assert known_failure(ValueError("EI9999")) is None


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("NPU out of memory. Tried to allocate 256.00 GiB (NPU 0; 64.00 GiB total capacity;", "256.00 GiB"),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of", "20.00 MiB"),
        ("out of memory, somehow", "some memory"),
    ],
)
def test_memory_of_a_device_ran_out(text: str, asked: str) -> None:
    assert out_of_memory(torch.OutOfMemoryError(text)) == asked


def test_memory_of_the_host_ran_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert out_of_memory(caught.value) == f"{2**20}.00 GiB"


def test_memory_did_not_run_out() -> None:
    assert out_of_memory(RuntimeError("CUDA error: out of memory")) == "some memory"
    assert out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
    assert out_of_memory(ValueError("out of memory")) is None
