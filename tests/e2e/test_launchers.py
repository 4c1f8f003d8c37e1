"""torchrun and accelerate launch start the same job; what accelerate contradicts is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.command import column, lctrain, summary

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
