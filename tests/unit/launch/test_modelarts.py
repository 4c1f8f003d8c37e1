"""What ModelArts' variables and rank tables become; every contradiction with both numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lctrain.config.launch import ModelArtsConfig
from lctrain.errors import ConfigError
from lctrain.launch.find import find_place
from lctrain.launch.place import Node
from lctrain.launch.rank_table import RankTable, Server, read_table
from lctrain.runtime.process import Ranks

HOST = {"MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "1", "MA_NUM_GPUS": "8", "VC_WORKER_HOSTS": "job-worker-0.job,b"}


def server(host: str, ranks: dict[int, int], **more: str) -> dict[str, Any]:
    """A server of a rank table. ranks: device by rank."""
    devices = [{"device_id": str(d), "device_ip": "192.168.1.8", "rank_id": str(r)} for r, d in ranks.items()]
    return {"server_id": host, "device": devices, **more}


def table_of(*servers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A rank table of the schema in use."""
    return {"status": "completed", "version": "1.0", "server_count": str(len(servers)), "server_list": servers, **more}


TWO = table_of(server("10.0.0.1", {0: 0, 1: 1}), server("10.0.0.2", {2: 0, 3: 1}))


@pytest.fixture
def card(tmp_path: Path) -> dict[str, str]:
    """The environment of the second card of the second host."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TWO))
    return {"RANK_TABLE_FILE": str(path), "RANK_ID": "3", "RANK_SIZE": "4", "ASCEND_DEVICE_ID": "1"}


def refusal(env: dict[str, str], **fields: Any) -> str:
    """What a launch says about an environment it refuses."""
    with pytest.raises(ConfigError) as caught:
        find_place(ModelArtsConfig(**fields), dict(env))
    text = str(caught.value)
    assert "; " in text  # and the mend
    return text


def test_a_process_a_host() -> None:
    env = dict(HOST)
    place = find_place(ModelArtsConfig(), env)
    assert place.ranks.launcher is None
    assert place.node == Node(2, 1, "job-worker-0.job:29500")
    assert (place.world_size, place.starter, place.note) == (16, "modelarts", None)
    assert env == HOST
    first = find_place(ModelArtsConfig(), HOST | {"VC_TASK_INDEX": "0"})
    assert first.note == "modelarts: 2 hosts x 8 devices, node 0, rendezvous job-worker-0.job:29500"


def test_one_host_needs_neither_number_nor_rendezvous() -> None:
    place = find_place(ModelArtsConfig(), {"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8"})
    assert (place.node, place.world_size, place.note) == (None, 8, "modelarts: 1 host x 8 devices, node 0")


def test_an_endpoint_of_ones_own(card: dict[str, str]) -> None:
    fields = {"rdzv_endpoint": "h:5"}
    assert find_place(ModelArtsConfig(**fields), dict(HOST)).node == Node(2, 1, "h:5")
    find_place(ModelArtsConfig(**fields), card)
    assert (card["MASTER_ADDR"], card["MASTER_PORT"]) == ("h", "5")


@pytest.mark.parametrize("name", sorted(HOST))
def test_a_missing_variable_is_named(name: str) -> None:
    text = refusal({k: v for k, v in HOST.items() if k != name})
    assert text.startswith(f"{name} is not set; ModelArts sets it in a training job")
    assert "or leave launch=modelarts out" in text


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({}, {"nproc_per_node": 4}, "launch.nproc_per_node=4 but MA_NUM_GPUS=8; leave launch.nproc_per_node out"),
        ({}, {"nnodes": 3}, "launch.nnodes=3 but modelarts has 2 nodes; "),
        ({}, {"node_rank": 0}, "launch.node_rank=0 but modelarts calls this node 1; "),
        ({"MA_NUM_HOSTS": "3"}, {}, "MA_NUM_HOSTS=3 but VC_WORKER_HOSTS names 2 hosts and VC_TASK_INDEX=1; "),
        ({"VC_TASK_INDEX": "2"}, {}, "MA_NUM_HOSTS=2 but VC_WORKER_HOSTS names 2 hosts and VC_TASK_INDEX=2; "),
        ({"MA_NUM_GPUS": "0"}, {}, "MA_NUM_GPUS=0 must be at least 1; "),
        ({"MA_NUM_HOSTS": "two"}, {}, "MA_NUM_HOSTS=two is not a whole number; "),
    ],
)
def test_a_contradiction_names_both(changes: dict[str, str], fields: dict[str, Any], said: str) -> None:
    assert said in refusal(HOST | changes, **fields)


def test_what_agrees_passes() -> None:
    place = find_place(ModelArtsConfig(nproc_per_node=8, nnodes=2, node_rank=1), dict(HOST))
    assert place.node == Node(2, 1, "job-worker-0.job:29500")


def test_a_process_a_card(card: dict[str, str]) -> None:
    given = dict(card)
    place = find_place(ModelArtsConfig(), card)
    assert place.ranks == Ranks(3, 4, 1, 2, "modelarts")
    assert (place.world_size, place.starter, place.node, place.note) == (4, "modelarts", None, None)
    assert {k: v for k, v in card.items() if k not in given and k != "OMP_NUM_THREADS"} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    first = find_place(ModelArtsConfig(), given | {"RANK_ID": "0", "ASCEND_DEVICE_ID": "0"})
    assert first.note == "modelarts: 2 hosts x 2 devices, a process each, rendezvous 10.0.0.1:29500"


@pytest.mark.parametrize("name", ["RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE", "ASCEND_DEVICE_ID"])
def test_a_card_without_one_of_its_variables(card: dict[str, str], name: str) -> None:
    del card[name]
    assert refusal(card).startswith(f"{name} is not set; ModelArts sets RANK_TABLE_FILE, RANK_ID")


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({"RANK_SIZE": "8"}, {}, "RANK_ID=3 of RANK_SIZE=8 but RANK_TABLE_FILE="),
        ({"RANK_ID": "4"}, {}, "RANK_ID=4 of RANK_SIZE=4 but RANK_TABLE_FILE="),
        ({"ASCEND_DEVICE_ID": "0"}, {}, "gives RANK_ID=3 device 1 of 10.0.0.2; "),
        ({}, {"nproc_per_node": 8}, "launch.nproc_per_node=8 but modelarts started 2 ranks on this node; "),
        ({}, {"nnodes": 1}, "launch.nnodes=1 but modelarts started ranks on 2 nodes; "),
        ({}, {"node_rank": 0}, "launch.node_rank=0 but RANK_TABLE_FILE="),
    ],
)
def test_a_card_of_another_job(
    card: dict[str, str], changes: dict[str, str], fields: dict[str, Any], said: str
) -> None:
    assert said in refusal(card | changes, **fields)


def test_some_of_a_hosts_cards_are_counted_from_0_in_a_container(card: dict[str, str], tmp_path: Path) -> None:
    half = table_of(server("10.0.0.1", {0: 4, 1: 5}))
    (tmp_path / "table.json").write_text(json.dumps(half))
    for device in ("1", "5"):
        env = card | {"RANK_ID": "1", "RANK_SIZE": "2", "ASCEND_DEVICE_ID": device}
        assert find_place(ModelArtsConfig(), env).ranks == Ranks(1, 2, 1, 2, "modelarts")


def read(tmp_path: Path, raw: object) -> RankTable:
    """A rank table from a file."""
    path = tmp_path / "table.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return read_table(path)


def test_both_schemas(tmp_path: Path) -> None:
    wanted = RankTable((Server("10.0.0.1", (0, 1)), Server("10.0.0.2", (0, 1))))
    assert read(tmp_path, TWO) == wanted
    assert wanted.size == 4
    instances = [
        {"pod_name": f"pod{n}", "server_id": f"10.0.0.{n + 1}", "devices": [{"device_id": "0"}, {"device_id": "1"}]}
        for n in range(2)
    ]
    older = {"status": "completed", "group_count": "1", "group_list": [{"instance_list": instances}]}
    assert read(tmp_path, older) == wanted
    apart = {"group_list": [{"instance_list": [instance]} for instance in instances]}
    assert read(tmp_path, apart) == wanted


def test_hosts_are_in_the_order_of_their_ranks_and_called_by_an_address(tmp_path: Path) -> None:
    table = table_of(
        server("node_1", {3: 1, 2: 0}, host_ip="10.0.0.2", container_ip="172.16.0.2"),
        server("node_0", {0: 0, 1: 1}, host_ip="10.0.0.1"),
        server("idle", {}),
        super_pod_list=[],
    )
    assert read(tmp_path, table) == RankTable((Server("10.0.0.1", (0, 1)), Server("172.16.0.2", (0, 1))))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("{", "cannot be read"),
        ([], "has neither server_list nor group_list but list; "),
        ({}, "has neither server_list nor group_list but nothing; "),
        ({"version": "3", "server_group_list": []}, "has neither server_list nor group_list but version, server_group"),
        (TWO | {"status": "initializing"}, "has status initializing; start once the platform has completed it"),
        (table_of({"server_id": "a"}), "lacks or misspells a field (KeyError: 'device'); "),
        (
            table_of({"device": [{"device_id": "0", "rank_id": "0"}]}),
            "lacks or misspells a field (KeyError: 'server_id')",
        ),
        (table_of(server("a", {0: 0}) | {"device": [{"device_id": "zero", "rank_id": "0"}]}), "a field (ValueError"),
        ({"status": "initializing"}, "has status initializing; start once the platform has completed it"),
        (table_of(), "gives its hosts the ranks []; "),
        (table_of(server("a", {1: 0, 2: 1})), "gives its hosts the ranks [[1, 2]]; ranks of a host must follow"),
        (table_of(server("a", {0: 0, 2: 1}), server("b", {1: 0, 3: 1})), "the ranks [[0, 2], [1, 3]]; "),
        (table_of(server("a", {0: 0, 1: 1}), server("b", {2: 0})), "gives its hosts 2, 1 devices; "),
    ],
)
def test_a_table_that_is_refused_says_why(raw: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, raw)
    text = str(caught.value)
    assert text.startswith(f"RANK_TABLE_FILE={tmp_path / 'table.json'} ")
    assert said in text


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(.*No such file.*\); give the JSON file"):
        read_table(tmp_path / "none.json")
