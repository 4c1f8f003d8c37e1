"""Accuracy of the large-batch recipe beside its small-batch baseline, over the same epochs and three seeds.

    python tools/bench/large_batch_accuracy.py [--seeds N] [KEY=VALUE ...]

Fashion-MNIST (`apt-get install dataset-fashion-mnist`), recipes resnet8_fashion_mnist (batch 256, SGD) and
resnet8_fashion_mnist_large_batch (batch 4,096, LARS); beside them, once, the baseline's SGD at the large batch with
its rate scaled linearly, and the LeNet recipe. `ours` and `peer` are mean top-1 of large batch and baseline in points,
`ratio` their difference. Whole jobs on two ranks, one after another; more overrides go to every ResNet job.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from common import finish, fixed_threads

TARGET, LENET_TARGET = -0.2, 89.0
LARGE = 4096
JOBS = {
    "baseline": ["recipe=resnet8_fashion_mnist"],
    "large_batch": ["recipe=resnet8_fashion_mnist_large_batch"],
    "large_batch_sgd": ["recipe=resnet8_fashion_mnist", f"train.global_batch_size={LARGE}"],
}


def main() -> None:
    """Train everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    top1: dict[str, list[float]] = {name: [] for name in JOBS}
    with tempfile.TemporaryDirectory() as folder:
        lenet = _train(["recipe=lenet_fashion_mnist"], Path(folder) / "lenet")
        for seed in range(arguments.seeds):
            for name, words in JOBS.items():
                if name == "large_batch_sgd" and seed > 0:
                    continue
                run_dir = Path(folder) / f"{name}-{seed}"
                top1[name].append(_train([*words, f"seed={seed}", *arguments.overrides], run_dir))
                print(f"{name} seed {seed}: top-1 {top1[name][-1]:.2f} %", flush=True)
    difference = mean(top1["large_batch"]) - mean(top1["baseline"])
    finish(
        {
            "name": "large_batch_accuracy",
            "ours": mean(top1["large_batch"]),
            "peer": mean(top1["baseline"]),
            "ratio": difference,
            "target": TARGET,
            "ok": difference >= TARGET and lenet >= LENET_TARGET,
            "unit": "% top-1; ratio is the difference in points",
            "plain_sgd_at_the_large_batch": mean(top1["large_batch_sgd"]),
            "lenet": lenet,
            "lenet_target": LENET_TARGET,
            "every_seed": top1,
        }
    )


def _train(words: list[str], run_dir: Path) -> float:
    """Top-1 in points of a whole job."""
    quiet = ["logging.pictures=false", "logging.tensorboard=false", "checkpoint.save_at_end=false"]
    command = [sys.executable, "-m", "lctrain", *words, *quiet, f"run_dir={run_dir}"]
    done = subprocess.run(command, env=fixed_threads(1), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return 100.0 * json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["metrics"]["top1"]


if __name__ == "__main__":
    main()
