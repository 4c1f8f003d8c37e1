"""torchrun, accelerate, Slurm and ModelArts start the same job; what contradicts it is refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.command import Running, column, lctrain, summary

Straight = Callable[[str], Path]


def accelerate(folder: Path, **fields: object) -> tuple[str, ...]:
    """`accelerate launch` with a config file, as far as `-m lctrain`."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",  # MULTI_CPU would leave starting ranks to mpirun
        "use_cpu": True,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": 2,
        "main_process_port": 0,
        "mixed_precision": "no",
        **fields,
    }
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    return ("accelerate.commands.launch", "--config_file", str(path), "-m", "lctrain")


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_an_external_launcher_gives_the_same_run(
    launcher: str, words: list[str], straight: Straight, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lctrain")
    module = torchrun if launcher == "torchrun" else accelerate(tmp_path)
    done = lctrain(*words, "train.max_steps=3", "parallel=fsdp_sp", f"run_dir={run}", cwd=tmp_path, module=module)
    assert done.returncode == 0, done.stdout + done.stderr
    assert column(run, "loss") == pytest.approx(column(straight("fsdp_sp"), "loss")[:3], rel=1e-6)
    assert summary(run)["world_size"] == 2
    assert f"started by {launcher}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"run dir: {run}"
    assert done.stdout.count("run dir:") == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("fields", "overrides", "said"),
    [
        (
            {"mixed_precision": "bf16"},
            ["parallel=fsdp_sp"],
            "accelerate's mixed_precision=bf16 contradicts precision=fp32",
        ),
        (
            {"distributed_type": "MULTI_CPU"},
            ["parallel=fsdp_sp"],
            "accelerate's num_processes is more than 1 but it started one process",
        ),
    ],
)
def test_a_contradiction_is_refused_once(
    fields: dict[str, object], overrides: list[str], said: str, words: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = lctrain(*words, *overrides, f"run_dir={run}", cwd=tmp_path, module=accelerate(tmp_path, **fields))
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert said in errors[0]
    assert not run.exists()


def free_port(first: int, last: int) -> int:
    """A port in a range that nothing listens on."""
    for port in range(first, last):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {first} to {last}")


def trained_as_one(processes: list[Running], run: Path, straight: Path, note: str) -> None:
    """Both processes of a job of two ranks ended well; the run is the undisturbed one; the first said `note` once."""
    assert [p.end() for p in processes] == [0, 0], "".join(p.err for p in processes)
    assert summary(run)["world_size"] == 2
    losses = column(run, "loss")
    assert losses == pytest.approx(column(straight, "loss")[: len(losses)], rel=1e-6)
    assert len(losses) == 3
    said = [line for p in processes for line in p.out.splitlines() if line.startswith("launch: ")]
    assert said == [f"launch: {note}"]
    assert said[0] in processes[0].out


def test_two_modelarts_hosts_train_as_one(words: list[str], straight: Straight, tmp_path: Path) -> None:
    run, endpoint = tmp_path / "run", f"127.0.0.1:{free_port(29500, 29600)}"
    job = [*words, "train.max_steps=3", "parallel=fsdp_sp", "launch=modelarts", f"run_dir={run}"]
    job.append(f"launch.rdzv_endpoint={endpoint}")  # another test may have the port that ModelArts jobs take
    env = {"MA_NUM_HOSTS": "2", "MA_NUM_GPUS": "1", "VC_WORKER_HOSTS": "127.0.0.1,127.0.0.1"}
    hosts = [Running(*job, cwd=tmp_path, name=f"h{n}", env=env | {"VC_TASK_INDEX": str(n)}) for n in range(2)]
    note = f"modelarts: 2 hosts x 1 device, node 0, rendezvous {endpoint}"
    trained_as_one(hosts, run, straight("fsdp_sp"), note)


def test_two_slurm_tasks_train_as_one(words: list[str], straight: Straight, tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port(20000, 20100)
    job = [*words, "train.max_steps=3", "parallel=fsdp_sp", "launch=slurm", f"run_dir={run}"]
    env = {
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_NNODES": "2",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_NODELIST": "127.0.0.1,localhost",
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
    }
    own = [{"SLURM_PROCID": str(n), "SLURM_NODEID": str(n)} for n in range(2)]
    tasks = [Running(*job, cwd=tmp_path, name=f"t{n}", env=env | own[n]) for n in range(2)]
    note = f"slurm: 2 nodes x 1 task, a rank each, rendezvous 127.0.0.1:{port}"
    trained_as_one(tasks, run, straight("fsdp_sp"), note)
