"""What srun's variables become; every contradiction with both numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lctrain.config.launch import SlurmConfig
from lctrain.errors import ConfigError
from lctrain.launch.find import find_place
from lctrain.launch.place import Node
from lctrain.launch.slurm import expand_hosts
from lctrain.runtime.process import Ranks

# The second task of the second of two nodes with two tasks each.
TASKS = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[011-012]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
}
# The task of the second of two nodes that starts the node's ranks.
NODES = TASKS | {
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
FIRST = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}


def refusal(env: dict[str, str], **fields: Any) -> str:
    """What a launch says about an environment it refuses."""
    with pytest.raises(ConfigError) as caught:
        find_place(SlurmConfig(**fields), dict(env))
    text = str(caught.value)
    assert "; " in text  # and the mend
    return text


def test_a_task_is_a_rank() -> None:
    env = dict(TASKS)
    place = find_place(SlurmConfig(), env)
    assert place.ranks == Ranks(3, 4, 1, 2, "slurm")
    assert (place.world_size, place.starter, place.node, place.note) == (4, "slurm", None, None)
    assert {k: v for k, v in env.items() if k not in TASKS and k != "OMP_NUM_THREADS"} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu011",
        "MASTER_PORT": "24567",
    }


def test_the_first_task_says_what_was_read() -> None:
    place = find_place(SlurmConfig(), TASKS | FIRST)
    assert place.note == "slurm: 2 nodes x 2 tasks, a rank each, rendezvous gpu011:24567"


def test_threads_are_shared_unless_somebody_chose() -> None:
    env = TASKS | {"OMP_NUM_THREADS": "3"}
    find_place(SlurmConfig(), env)
    assert env["OMP_NUM_THREADS"] == "3"
    env = dict(TASKS)
    find_place(SlurmConfig(), env)
    assert int(env["OMP_NUM_THREADS"]) >= 1


def test_a_task_starts_the_ranks_of_its_node() -> None:
    env = dict(NODES)
    place = find_place(SlurmConfig(nproc_per_node=8), env)
    assert place.ranks.launcher is None
    assert (place.world_size, place.starter, place.note) == (16, "slurm", None)
    assert place.node == Node(2, 1, "gpu011:24567")
    assert set(env) - set(NODES) == {"LOCAL_RANK"}
    first = find_place(SlurmConfig(nproc_per_node=8), NODES | FIRST)
    assert first.note == "slurm: 2 nodes x 8 ranks, node 0, rendezvous gpu011:24567"


def test_one_node_needs_no_rendezvous_of_nodes() -> None:
    one = NODES | FIRST | {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NNODES": "1"}
    place = find_place(SlurmConfig(nproc_per_node=8), one | {"SLURM_JOB_NODELIST": "a"})
    assert (place.node, place.world_size, place.ranks.launcher) == (None, 8, None)


def test_an_endpoint_of_ones_own() -> None:
    env = {k: v for k, v in TASKS.items() if k not in ("SLURM_JOB_NODELIST", "SLURM_JOB_ID")}
    find_place(SlurmConfig(rdzv_endpoint="[fe80::1]:77"), env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("fe80::1", "77")


def test_a_steps_own_variables_come_before_its_jobs() -> None:
    env = TASKS | {
        "SLURM_NNODES": "5",
        "SLURM_NTASKS": "10",
        "SLURM_TASKS_PER_NODE": "2(x5)",
        "SLURM_JOB_NODELIST": "gpu[009-013]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "gpu[012-013]",
    }
    assert find_place(SlurmConfig(), env).ranks == Ranks(3, 4, 1, 2, "slurm")
    assert env["MASTER_ADDR"] == "gpu012"


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"SLURM_TASKS_PER_NODE"}))
def test_a_missing_variable_is_named(name: str) -> None:
    text = refusal({k: v for k, v in TASKS.items() if k != name})
    assert text.startswith(f"{name} is not set; start with srun, e.g. srun --nodes=2")
    assert "or leave launch=slurm out" in text


def test_tasks_a_node_under_either_name() -> None:
    env = {k: v for k, v in TASKS.items() if k != "SLURM_TASKS_PER_NODE"}
    assert refusal(env).startswith("SLURM_NTASKS_PER_NODE is not set; ")
    assert find_place(SlurmConfig(), env | {"SLURM_NTASKS_PER_NODE": "2"}).ranks.local_world_size == 2
    assert find_place(SlurmConfig(), TASKS | {"SLURM_TASKS_PER_NODE": "2,2"}).ranks.local_world_size == 2


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({}, {"nproc_per_node": 4}, "launch.nproc_per_node=4 but Slurm started 2 tasks on each node; "),
        ({}, {"nnodes": 3}, "launch.nnodes=3 but slurm started ranks on 2 nodes; leave launch.nnodes out"),
        ({}, {"node_rank": 0}, "launch.node_rank=0 but Slurm calls this node 1; leave launch.node_rank out"),
        ({"SLURM_TASKS_PER_NODE": "3,1"}, {}, "SLURM_TASKS_PER_NODE=3,1 is not the same number of tasks on every"),
        ({"SLURM_TASKS_PER_NODE": "0(x2)"}, {}, "SLURM_TASKS_PER_NODE=0(x2) is not the same number of tasks"),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, {}, "=4(x2) with SLURM_NNODES=2 is not SLURM_NTASKS=4; "),
        ({"SLURM_PROCID": "2"}, {}, "SLURM_PROCID=2 is task 1 of node 1, but ranks of a node must follow each other"),
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID=x is not a whole number; start with srun"),
        ({"SLURM_JOB_NODELIST": "a,b,c"}, {}, "SLURM_JOB_NODELIST=a,b,c names 3 hosts but the step has 2 nodes"),
        ({"SLURM_JOB_NODELIST": "a[1-2"}, {}, "the host list a[1-2 is not one of Slurm's"),
    ],
)
def test_a_contradiction_names_both(changes: dict[str, str], fields: dict[str, Any], said: str) -> None:
    assert said in refusal(TASKS | changes, **fields)


def test_a_contradiction_is_for_the_first_task_of_a_node_to_say() -> None:
    env = dict(TASKS)
    with pytest.raises(ConfigError):
        find_place(SlurmConfig(nproc_per_node=4), env)
    assert env["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nnodes": 3}, "launch.nnodes=3 but slurm has 2 nodes; "),
        ({"node_rank": 0}, "launch.node_rank=0 but slurm calls this node 1; "),
    ],
)
def test_a_node_of_another_number_is_refused(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(NODES, nproc_per_node=8, **fields)
    agreeing = find_place(SlurmConfig(nproc_per_node=8, nnodes=2, node_rank=1), dict(NODES))
    assert agreeing.node == Node(2, 1, "gpu011:24567")


@pytest.mark.parametrize(
    "text", ["gpu[1-2", "gpu1-2]", "gpu[2-1]", "gpu[a]", "gpu[1--2]", "gpu[]", "a,,b", ",a", "", "a b"]
)
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one of Slurm's"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("a,b-1.site", ["a", "b-1.site"]),
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("a[3,1]", ["a3", "a1"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_the_port_follows_from_the_job_within_a_safe_range() -> None:
    ports = []
    for job in ("0", "9999", "10000", "4294967295"):
        env = TASKS | {"SLURM_JOB_ID": job}
        find_place(SlurmConfig(), env)
        ports.append(int(env["MASTER_PORT"]))
    assert ports == [20000, 29999, 20000, 27295]
    ports = []
    for step in ("0", "1", "2"):  # side by side on the same hosts
        env = TASKS | {"SLURM_STEP_ID": step}
        find_place(SlurmConfig(), env)
        ports.append(int(env["MASTER_PORT"]))
    assert len(set(ports)) == 3


def test_a_batch_script_without_srun_is_no_task() -> None:
    """It is given the numbers of a job of which it is no part; a rank would wait for others that nobody starts."""
    script = {name: value for name, value in (TASKS | FIRST).items() if name != "SLURM_STEP_ID"}
    said = refusal(script)
    assert "SLURM_STEP_ID is not set" in said
    assert "srun" in said
