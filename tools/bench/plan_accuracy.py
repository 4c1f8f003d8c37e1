"""Predicted against measured peak of tensor memory, over configurations that run on two CPU ranks.

    python tools/bench/plan_accuracy.py

Each row is a job whose first steps are run on real ranks and traced on fake ones. Measured is what torch's allocator
held (the profiler's account of it on a CPU, without gloo's own copies of messages). `ours` is the largest relative
error, `target` what it may be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import finish, fixed_threads

TARGET = 0.05
_TEXT = ["recipe=llama_tiny_32k", "data.max_length=4096", "model.architecture.num_hidden_layers=4"]
_BUCKET = "parallel.deepspeed.reduce_bucket_size=1000000"
ROWS: dict[str, list[str]] = {
    "single, full": [*_TEXT, "parallel=single", "memory=full"],
    "single, none, untied": [
        *_TEXT, "parallel=single", "memory=none", "model.architecture.tie_word_embeddings=false",
    ],
    "single, bf16, tiled MLP": [*_TEXT, "parallel=single", "precision=bf16", "memory.tiled_mlp=4"],
    "ddp, none": [*_TEXT, "parallel=ddp", "memory=none"],
    "ddp, bf16, selective": [*_TEXT, "parallel=ddp", "memory=selective", "precision=bf16"],
    "fsdp, full": [*_TEXT, "parallel=fsdp", "memory=full"],
    "fsdp, none, bf16": [*_TEXT, "parallel=fsdp", "memory=none", "precision=bf16"],
    "fsdp, adapters": [*_TEXT, "parallel=fsdp", "model.lora.rank=8"],
    "fsdp_sp, full": [*_TEXT, "parallel=fsdp_sp"],
    "fsdp_sp, selective, bf16": [*_TEXT, "parallel=fsdp_sp", "memory=selective", "precision=bf16"],
    "fsdp_cp (ring), full": [*_TEXT, "parallel=fsdp_cp"],
    "fsdp_tp, full": [*_TEXT, "parallel=fsdp_tp"],
    "zero1, bf16": [*_TEXT, "parallel=zero1", "precision=bf16", _BUCKET],
    "zero3, full": [*_TEXT, "parallel=zero3", _BUCKET],
    "resnet8, ddp": ["recipe=resnet8_fashion_mnist"],
    "resnet8, LARS, ghost": ["recipe=resnet8_fashion_mnist_large_batch"],
    "resnet50 at 64 px, fsdp": [
        "recipe=resnet50_imagenet", "parallel=fsdp", "data.image_size=64", "train.micro_batch_size=8",
        "train.global_batch_size=32", "precision=fp32", "launch.default_ranks=2",
    ],
}  # fmt: skip


def main() -> None:
    """Run every row."""
    errors: dict[str, float] = {}
    print(f"{'':<26}{'predicted MiB':>14}{'measured MiB':>14}{'error':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(ROWS.items()):
            predicted, measured = _row(words, Path(folder) / str(number))
            error = predicted / measured - 1
            errors[name] = abs(error)
            print(f"{name:<26}{predicted / 2**20:>14.2f}{measured / 2**20:>14.2f}{100 * error:>8.2f} %", flush=True)
    worst = max(errors.values())
    finish(
        {
            "name": "plan_accuracy",
            "ours": worst,
            "peer": 0.0,
            "ratio": worst,
            "target": TARGET,
            "ok": worst <= TARGET,
            "unit": "largest relative error of the predicted peak",
            "rows": errors,
        }
    )


def _row(words: list[str], run_dir: Path) -> tuple[float, float]:
    """(predicted, measured) bytes of tensors."""
    command = [
        sys.executable,
        "-m",
        "lctrain",
        "plan",
        *words,
        "device=cpu",
        "plan.calibrate=true",
        f"run_dir={run_dir}",
    ]
    done = subprocess.run(command, env=fixed_threads(1), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    record = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    return record["tensor_bytes"], record["measured"]["peak_bytes"]


if __name__ == "__main__":
    main()
