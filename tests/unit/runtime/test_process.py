"""Who a process is, by the environment; stores; seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lctrain.errors import ConfigError
from lctrain.runtime.process import Ranks, connect, read_ranks
from lctrain.runtime.seed import derive

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}


def test_torchrun() -> None:
    ranks = read_ranks(TORCHRUN)
    assert ranks == Ranks(rank=3, world_size=8, local_rank=1, local_world_size=2, launcher="torchrun")
    assert not ranks.is_main
    assert read_ranks({**TORCHRUN, "RANK": "0"}).is_main


def test_accelerate_sets_what_torchrun_sets_and_says_so() -> None:
    assert read_ranks({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate"
    assert read_ranks({"ACCELERATE_MIXED_PRECISION": "no"}) == Ranks(launcher="accelerate")


def test_accelerate_that_was_asked_for_more_ranks_than_it_started_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_processes is more than 1 but it started one process"):
        read_ranks({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})


@pytest.mark.parametrize("mark", ["LCTRAIN_STORE_FD", "LCTRAIN_LAUNCHED"])
def test_ours(mark: str) -> None:
    env = {**TORCHRUN, mark: "1", "ACCELERATE_MIXED_PRECISION": "no"}
    assert read_ranks(env).launcher == "lctrain"


def test_a_lone_process() -> None:
    assert read_ranks({"MASTER_ADDR": "h", "LOCAL_RANK": "0"}) == Ranks()
    assert Ranks().is_main


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_refused(missing: str) -> None:
    env = {k: v for k, v in TORCHRUN.items() if k != missing}
    with pytest.raises(ConfigError, match=f"{missing} is not set although RANK or WORLD_SIZE is"):
        read_ranks(env)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "x", "RANK=x is not a whole number from 0 to 7; start with torchrun"),
        ("RANK", "8", "RANK=8 is not a whole number from 0 to 7"),
        ("RANK", "-1", "RANK=-1 is not a whole number from 0 to 7"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE=2.0 is not a whole number of 1 or more"),
        ("WORLD_SIZE", "", "WORLD_SIZE= is not a whole number of 1 or more"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is not"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE=0 is not a whole number from 1 to 8"),
        ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE=3 does not divide WORLD_SIZE=8"),
        ("LOCAL_RANK", "2", "LOCAL_RANK=2 is not a whole number from 0 to 1"),
    ],
)
def test_what_is_no_rank(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_ranks({**TORCHRUN, name: value})
    assert str(caught.value).startswith(said)


def test_the_local_number_of_ranks_falls_back_to_all() -> None:
    env = {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}
    assert read_ranks(env).local_world_size == 8


def test_a_lone_process_needs_no_network() -> None:
    store = connect(Ranks(), 5, {})
    store.set("a", "1")
    assert type(store).__name__ == "HashStore"
    assert store.get("a") == b"1"


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    seeds = [derive(0, "weights"), derive(1, "weights"), derive(0, "step", 1), derive(0, "step", 2), derive(0, "step")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(0, "step", 12) != derive(0, "step1", 2)
    code = "from lctrain.runtime.seed import derive; print(derive(0, 'weights'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == seeds[0]
