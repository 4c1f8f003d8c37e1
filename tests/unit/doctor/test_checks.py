"""Each check, on machines that are right and on machines with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lctrain.doctor.devices import npu_processes
from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Level
from lctrain.doctor.report import CHECKS, examine, has_fault, lines
from lctrain.runtime.ascend import Packages
from tests.unit.doctor.machines import CARD, CPU, CUDA, GIB, NPU, faults, found, with_env, with_probe

BOTH = {"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}
SMI = """
+-------------------------------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 94.0        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3368 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 2453571       | python3.11               | 3456                    |
+===========================+===============+====================================================+
"""


@pytest.mark.parametrize(("machine", "checks"), [(NPU, 12), (CUDA, 7), (CPU, 4)], ids=["npu", "cuda", "cpu"])
def test_a_machine_that_is_right(machine: Facts, checks: int) -> None:
    findings = examine(machine)
    assert [f.line() for f in findings if f.level is not Level.ok or f.mend] == []
    assert len(findings) == checks
    assert not has_fault(findings)
    text = lines(machine.kind, findings)
    assert text[0] == f"doctor: device={machine.kind}"
    assert text[-1] == "doctor: 0 faults, 0 warnings"
    assert len(text) == checks + 2


def test_every_check_speaks_somewhere() -> None:
    odd = with_env(with_probe(NPU, transferred=True), {"RANK_TABLE_FILE": "/nowhere"})
    silent = [check for check in CHECKS if check(odd) is None]
    assert silent == []


PLANTED: list[tuple[Facts, str, Level, str, str]] = [
    (replace(NPU, packages=Packages()), "torch", Level.fault, "torch is not installed", "pip install torch"),
    (replace(CUDA, packages=Packages("2.13.0+cpu")), "torch", Level.fault, "built without CUDA", "a CUDA build"),
    (
        replace(NPU, packages=Packages("2.13.0+cpu")),
        "torch_npu",
        Level.fault,
        "torch_npu is not installed",
        "pip install torch_npu==2.13.0",
    ),
    (
        replace(NPU, packages=Packages("2.13.0+cpu", "2.12.0", "2.12.0")),
        "torch_npu",
        Level.fault,
        "torch_npu 2.12.0 needs torch 2.12.0 and torch 2.13.0+cpu is installed",
        "pip install torch_npu==2.13.0",
    ),
    (
        replace(NPU, packages=Packages("2.13.0", "2.13.0", "2.13.0", "13.0")),
        "torch build",
        Level.fault,
        "torch 2.13.0 is a build for CUDA 13.0",
        "pip install torch==2.13.0 from PyTorch's index of CPU builds",
    ),
    (
        with_probe(NPU, missing_library="libascendcl.so", error="torch_npu cannot be imported"),
        "CANN",
        Level.fault,
        "the loader does not find libascendcl.so",
        "source CANN's set_env.sh",
    ),
    (replace(NPU, env={}), "CANN", Level.warning, "ASCEND_HOME_PATH is not set", "set_env.sh"),
    (with_env(NPU, {"ASCEND_HOME_PATH": "/no/where"}), "CANN", Level.fault, "/no/where is not a folder", "set_env.sh"),
    (with_probe(NPU, transferred=True), "transfer", Level.warning, "transfer_to_npu has been", "remove that import"),
    (with_probe(NPU, cards=()), "devices", Level.fault, "no npu device is visible", "ASCEND_RT_VISIBLE_DEVICES"),
    (
        with_probe(with_env(NPU, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}), cards=()),
        "devices",
        Level.fault,
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch_npu out of device=auto",
        "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or give device=npu",
    ),
    (with_probe(CUDA, cards=()), "devices", Level.fault, "no cuda device is visible", "CUDA_VISIBLE_DEVICES"),
    (
        with_probe(NPU, cards=(), error="device=npu but Ascend310P3 is an inference card", mend="run on an Ascend 910"),
        "devices",
        Level.fault,
        "Ascend310P3 is an inference card",
        "run on an Ascend 910",
    ),
    (
        with_probe(NPU, cards=(CARD, replace(CARD, free=20 * GIB))),
        "devices",
        Level.warning,
        "2 x Ascend910B3, GiB free: 63.0 of 64.0, 20.0 of 64.0",
        "end what holds memory of npu 1",
    ),
    (
        with_probe(NPU, bf16=False, cards=(replace(CARD, name="Ascend910A"),)),
        "bf16",
        Level.warning,
        "Ascend910A has no bf16 arithmetic, and its fp16 stops at 65504",
        "use precision=fp16",
    ),
    (with_probe(CUDA, bf16=False), "bf16", Level.warning, "HBM3 has no bf16 arithmetic", "use precision=fp16"),
    (
        replace(NPU, processes=SMI),
        "processes",
        Level.warning,
        "process 2453571 (python3.11) holds 3456 MB of npu 1",
        "end them",
    ),
    (replace(CUDA, processes="12, python, 5 MiB\n"), "processes", Level.warning, "12, python, 5 MiB", "end them"),
    (with_env(NPU, BOTH), "allocator", Level.fault, "are both set", "unset PYTORCH_ALLOC_CONF"),
    (with_env(NPU, {"HCCL_CONNECT_TIMEOUT": "120"}), "connect", Level.warning, "=120 is below 600 s", "=600 or more"),
    (with_env(NPU, {"HCCL_CONNECT_TIMEOUT": "x"}), "connect", Level.fault, "=x is not a whole number", "unset HCCL_C"),
    (with_env(NPU, {"HCCL_EXEC_TIMEOUT": "1836"}), "execution", Level.warning, "=1836 is not below", "unset HCCL_EXEC"),
    (with_env(NPU, {"HCCL_EXEC_TIMEOUT": "x"}), "execution", Level.fault, "=x is not a whole number", "unset HCCL_E"),
    (with_env(NPU, {"RANK_TABLE_FILE": "/nowhere"}), "rank table", Level.fault, "cannot be read", "unset RANK_TABLE"),
    (replace(NPU, shared_memory=64 * 2**20), "shared mem", Level.warning, "/dev/shm has 64 MiB", "--shm-size=16g"),
    (replace(NPU, cores=1), "cores", Level.warning, "1 core for 2 ranks", "widen the affinity"),
]


@pytest.mark.parametrize(
    ("machine", "check", "level", "text", "mend"), PLANTED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_one_thing_wrong(machine: Facts, check: str, level: Level, text: str, mend: str) -> None:
    finding = found(machine, check)
    assert finding is not None
    assert finding.level is level
    assert text in finding.text
    assert mend in finding.mend
    assert faults(machine) == ([check] if level is Level.fault else [])
    line = finding.line()
    assert "\n" not in line
    assert line.startswith(level.value)
    assert line.endswith(f"{finding.text}; {finding.mend}")


def test_a_reason_is_given_once() -> None:
    """The probe fails for the reason that another check names; alone, it is the devices' finding."""
    why: dict[str, Any] = {"error": "why", "mend": "mend", "cards": ()}
    assert faults(with_probe(with_env(NPU, BOTH), **why)) == ["allocator"]
    assert faults(replace(with_probe(NPU, **why), packages=Packages("2.13.0+cpu"))) == ["torch_npu"]
    assert faults(replace(with_probe(CUDA, **why), packages=Packages("2.13.0+cpu"))) == ["torch"]
    assert faults(with_probe(with_env(CUDA, BOTH), **why)) == ["devices"]
    assert faults(with_probe(CPU, **why)) == ["devices"]


def test_what_breaks_torch_on_a_machine_for_another_device() -> None:
    broken = Packages("2.13.0", "2.12.0", "2.12.0", "13.0")
    assert faults(replace(CUDA, packages=broken)) == ["torch_npu", "torch build"]
    apart = with_env(replace(CUDA, packages=replace(broken, needs="2.13.0")), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert faults(apart) == []
    assert faults(with_probe(replace(CPU, packages=NPU.packages), missing_library="libhccl.so")) == ["CANN"]


def test_values_that_are_right_are_shown() -> None:
    env = {"HCCL_CONNECT_TIMEOUT": "900", "HCCL_EXEC_TIMEOUT": "68", "PYTORCH_ALLOC_CONF": "a:1"}
    machine = with_env(NPU, env)
    shown = {check: str(found(machine, check)) for check in ("connect", "execution", "allocator")}
    assert "HCCL_CONNECT_TIMEOUT=900 s; collectives 1800 s" in shown["connect"]
    assert "HCCL_EXEC_TIMEOUT=68 s" in shown["execution"]
    assert "PYTORCH_ALLOC_CONF=a:1" in shown["allocator"]
    assert "a run sets 1800 s" in str(found(NPU, "connect"))
    assert "a run sets 1768 s" in str(found(NPU, "execution"))


def test_without_the_vendors_tool_nobody_looked() -> None:
    finding = found(replace(NPU, processes=None), "processes")
    assert finding is not None
    assert finding.level is Level.ok
    assert "npu-smi is not here or does not answer" in finding.text


def test_only_processes_are_read_from_npu_smi() -> None:
    assert npu_processes(SMI) == ["process 2453571 (python3.11) holds 3456 MB of npu 1"]


@pytest.mark.parametrize(
    ("table", "level"),
    [
        ('{"server_list": [{"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}]}', Level.ok),
        ('{"status": "completed", "server_list": []}', Level.fault),
        ('{"status": "initializing"}', Level.fault),
        ("[]", Level.fault),
        ("{", Level.fault),
    ],
)
def test_rank_tables(table: str, level: Level, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(table)
    finding = found(with_env(NPU, {"RANK_TABLE_FILE": str(path)}), "rank table")
    assert finding is not None
    assert finding.level is level


def test_a_machine_without_shared_memory_is_not_asked() -> None:
    assert found(replace(CPU, shared_memory=None), "shared mem") is None


def test_the_count() -> None:
    findings = examine(replace(with_env(NPU, BOTH), cores=1))
    assert lines("npu", findings)[-1] == "doctor: 1 fault, 1 warning"
    assert has_fault(findings)
