"""Whether torch, torch_npu and CANN are here, fit together and can be imported."""

from __future__ import annotations

from pathlib import Path

from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, fault, ok, warning
from lctrain.runtime.ascend import SET_ENV, build_problem, pair_problem, transfer_problem


def torch(facts: Facts) -> Finding:
    """Installed at all, and with what it was built for."""
    if facts.packages.torch is None:
        return fault("torch", "torch is not installed", "pip install torch")
    built = f"for CUDA {facts.packages.cuda}" if facts.packages.cuda else "without CUDA"
    if facts.kind == "cuda" and facts.packages.cuda is None:
        return fault("torch", f"torch {facts.packages.torch} is built {built}", "install a CUDA build of torch")
    return ok("torch", f"torch {facts.packages.torch}, built {built}, Python {facts.python}, {facts.machine}")


def torch_npu(facts: Facts) -> Finding | None:
    """Installed where NPUs are wanted, and for this torch."""
    npu = facts.packages.torch_npu
    problem = pair_problem(facts.packages)
    if problem is not None:
        return fault("torch_npu", *problem)
    if facts.kind != "npu":
        return None
    if npu is None and facts.packages.torch is None:
        return None
    if npu is None:
        return fault("torch_npu", "torch_npu is not installed", f"pip install torch_npu=={facts.packages.release}")
    return ok("torch_npu", f"torch_npu {npu} fits torch {facts.packages.torch}")


def build(facts: Facts) -> Finding | None:
    """A CUDA build of torch beside torch_npu, which can end the process when torch is imported."""
    problem = build_problem(facts.packages, facts.env)
    if problem is not None:
        return fault("torch build", *problem)
    return ok("torch build", "a CPU build, as torch_npu wants") if facts.packages.torch_npu is not None else None


def cann(facts: Facts) -> Finding | None:
    """The loader finds CANN's libraries, and its folder is named."""
    if facts.packages.torch_npu is None or (facts.kind != "npu" and facts.probe.missing_library is None):
        return None
    missing, home = facts.probe.missing_library, facts.env.get("ASCEND_HOME_PATH")
    if missing is not None:
        return fault("CANN", f"the loader does not find {missing}", SET_ENV)
    if home is None:
        return warning("CANN", "ASCEND_HOME_PATH is not set, which DeepSpeed and CANN's compiler read", SET_ENV)
    if not Path(home).is_dir():
        return fault("CANN", f"ASCEND_HOME_PATH={home} is not a folder", SET_ENV)
    return ok("CANN", f"ASCEND_HOME_PATH={home}, libraries found")


def transfer(facts: Facts) -> Finding | None:
    """transfer_to_npu, imported by something that starts with every process."""
    problem = transfer_problem(active=facts.probe.transferred)
    return None if problem is None else warning("transfer", *problem)
