"""launch=default and launch=torchrun: whose ranks these are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lctrain import cli
from lctrain.config.launch import LaunchConfig, TorchrunConfig
from lctrain.errors import ConfigError
from lctrain.launch.find import find_place
from lctrain.launch.place import Node, Place
from lctrain.runtime.process import Ranks
from tests.support.command import environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}
ONE_TASK = {
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "a",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}


def refusal(launch: LaunchConfig, env: dict[str, str]) -> str:
    """What a launch says about an environment it refuses."""
    with pytest.raises(ConfigError) as caught:
        find_place(launch, dict(env))
    return str(caught.value)


def test_nobody_started_ranks() -> None:
    assert find_place(LaunchConfig(), {}) == Place(Ranks())
    several = LaunchConfig(nnodes=2, node_rank=1, rdzv_endpoint="h:1")
    assert find_place(several, {}) == Place(Ranks(), node=Node(2, 1, "h:1"))


def test_a_platforms_processes_are_no_jobs_of_their_own() -> None:
    tasks = ONE_TASK | {"SLURM_NTASKS": "2"}
    said = refusal(LaunchConfig(), tasks)
    assert said.startswith("srun started 2 tasks and each would train alone; add launch=slurm, or start one process")
    cards = {"RANK_ID": "0", "RANK_SIZE": "8", "DEVICE_ID": "0"}
    assert "RANK_SIZE=8 processes were started and each would train alone; add launch=modelarts" in refusal(
        LaunchConfig(), cards
    )
    several = LaunchConfig(nnodes=2, node_rank=1, rdzv_endpoint="h:1")
    for launch, env in ((LaunchConfig(), ONE_TASK), (LaunchConfig(nnodes=1), tasks), (several, tasks)):
        assert find_place(launch, env).ranks == Ranks()
    batch_script = {name: value for name, value in tasks.items() if name != "SLURM_STEP_ID"}
    assert find_place(LaunchConfig(), batch_script).ranks == Ranks()


@pytest.mark.parametrize("launch", [LaunchConfig(), TorchrunConfig(), TorchrunConfig(nproc_per_node=2, nnodes=2)])
def test_torchrun_is_found(launch: LaunchConfig) -> None:
    env = dict(TORCHRUN)
    assert find_place(launch, env) == Place(Ranks(3, 4, 1, 2, "torchrun"), 4, "torchrun")
    assert env == TORCHRUN


def test_accelerate_is_found_and_is_not_torchrun() -> None:
    both = TORCHRUN | ACCELERATE
    assert find_place(LaunchConfig(), dict(both)) == Place(Ranks(3, 4, 1, 2, "accelerate"), 4, "accelerate")
    assert find_place(LaunchConfig(), dict(ACCELERATE)) == Place(Ranks(launcher="accelerate"), 1, "accelerate")
    said = refusal(TorchrunConfig(), both)
    assert said.startswith("launch=torchrun but accelerate started this process; write torchrun --nproc-per-node=8 -m")


def test_torchrun_that_is_not_there_is_refused_with_its_command() -> None:
    said = refusal(TorchrunConfig(), {})
    assert said == (
        "launch=torchrun but RANK and WORLD_SIZE are not set; write torchrun --nproc-per-node=8 -m lctrain ... "
        "launch=torchrun, or leave launch=torchrun out"
    )


@pytest.mark.parametrize("cls", [LaunchConfig, TorchrunConfig])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nproc_per_node": 4}, "launch.nproc_per_node=4 but torchrun started 2 ranks on this node; "),
        ({"nnodes": 1}, "launch.nnodes=1 but torchrun started ranks on 2 nodes; "),
    ],
)
def test_other_numbers_than_torchruns(cls: type[LaunchConfig], fields: dict[str, Any], said: str) -> None:
    assert said in refusal(cls(**fields), TORCHRUN)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("torchrun", "launch=torchrun but RANK and WORLD_SIZE are not set; write torchrun"),
        ("slurm", "SLURM_STEP_ID is not set; start with srun"),
        ("modelarts", "MA_NUM_HOSTS is not set; ModelArts sets it in a training job"),
    ],
)
@pytest.mark.parametrize("words", [["train"], ["verify"], ["evaluate", "data.held_out=0.1"], ["-m"]])
def test_every_verb_refuses_a_launcher_that_is_not_there(
    words: list[str], launch: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "recipe=llama_tiny_32k", f"launch={launch}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert list(tmp_path.rglob("*.yaml")) == []


def test_a_sweep_is_not_for_one_of_a_launchers_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment()) | {*TORCHRUN, "OMP_NUM_THREADS"}:
        monkeypatch.setenv(name, "")  # what the command line sets ends with this test
        monkeypatch.delenv(name)
    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["-m", "recipe=llama_tiny_32k", "launch=slurm", "seed=1,2"]) == 2
    assert "-m starts whole jobs and cannot run inside ranks that slurm started; " in capsys.readouterr().err
    assert os.environ["RANK"] == "0"
