"""What is patched for a job on fake tensors is there to be patched, works, and is put back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lctrain.config.compose import compose_config
from lctrain.config.hardware import load_hardware
from lctrain.config.parallel import DdpConfig, Zero3Config
from lctrain.errors import ConfigError
from lctrain.parallel.offload import HostInputs
from lctrain.plan.fakes import alone_in_deepspeed, fake_groups, movable_modules, real_meshes
from lctrain.plan.simulate import Simulation, simulate


def patched() -> dict[str, Any]:
    """Everything a simulation replaces, as it is now."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return {
        "resize_": torch.UntypedStorage.resize_,
        "swap_tensors": torch.utils.swap_tensors,
        "_concatenate": DeviceMesh._concatenate,
        "_out": HostInputs._out,
        "_fetch": HostInputs._fetch,
        "propagate": ShardingPropagator._propagate_tensor_meta_non_cached,
        "agree": coordinator.assert_ints_same_as_other_ranks,
        "cdb": comm.cdb,
        "modes": len(_get_current_dispatch_mode_stack()),
        "group": dist.is_initialized(),
        "environment": {
            n: os.environ.get(n) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        },
    }


def run(layout: str, *words: str) -> Simulation:
    """A short job of two ranks on an accelerator."""
    config = compose_config(
        ["recipe=llama_tiny_32k", "data.max_length=64", f"parallel={layout}", "memory=offload", *words]
    )
    return simulate(config, load_hardware("a100"), 2)


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed is told once which accelerator it has; other tests need not be."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_nothing_stays_patched_whatever_runs_and_however_often() -> None:
    before = patched()
    first = run("zero3")
    assert patched() == before
    middle = run("fsdp_tp")
    assert patched() == before
    assert middle.events
    again = run("zero3")
    assert patched() == before
    assert [(e.delta, e.phase, e.place) for e in again.events] == [(e.delta, e.phase, e.place) for e in first.events]
    assert again.operations == first.operations


def test_a_simulation_that_fails_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from lctrain.plan import simulate as module

    before = patched()

    def broken(*given: Any, **named: Any) -> None:
        assert dist.is_initialized()
        assert os.environ["WORLD_SIZE"] == "2"
        raise ConfigError("no")

    monkeypatch.setattr(module, "build", broken)
    for layout in ("fsdp", "zero3"):
        with pytest.raises(ConfigError, match="no"):
            run(layout)
        assert patched() == before


def test_a_real_step_after_a_simulation_is_real() -> None:
    run("fsdp")
    model = torch.nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert type(model.weight.data) is torch.Tensor


def test_fake_groups_are_whole_worlds_and_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = dict(os.environ)
    with fake_groups(512):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 512)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "512")
        x = torch.ones(3)
        dist.all_reduce(x)  # with nobody, and at once
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_modules_of_fake_tensors_move() -> None:
    """The name it patches is the one module.to() calls."""
    original = torch.utils.swap_tensors
    future = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, movable_modules(fake):
            assert torch.utils.swap_tensors is not original
            model = torch.nn.Linear(4, 4)
            model.to(torch.bfloat16)
            assert model.weight.dtype == torch.bfloat16
            model.to("cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(future)
    assert torch.utils.swap_tensors is original


def test_meshes_join_with_real_rank_numbers() -> None:
    original = DeviceMesh._concatenate
    with fake_groups(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        with FakeTensorMode(allow_non_fake_inputs=True), real_meshes():
            assert DeviceMesh._concatenate is not original
            joined = DeviceMesh._concatenate([mesh["shard"], mesh["tp"]])
        assert joined.mesh.tolist() == [[0, 1], [2, 3]]
    assert DeviceMesh._concatenate is original


def test_deepspeed_is_asked_alone_only_where_it_runs() -> None:
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import groups

    agree = coordinator.assert_ints_same_as_other_ranks
    with alone_in_deepspeed(DdpConfig()):
        assert coordinator.assert_ints_same_as_other_ranks is agree
    kept = groups._WORLD_GROUP
    with alone_in_deepspeed(Zero3Config()):
        assert coordinator.assert_ints_same_as_other_ranks is not agree
        coordinator.assert_ints_same_as_other_ranks([1])
        groups._WORLD_GROUP = "fake"
    assert coordinator.assert_ints_same_as_other_ranks is agree
    assert groups._WORLD_GROUP is kept
