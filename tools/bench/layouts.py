"""Every layout on two ranks at 16,384 tokens: tokens a second and peak memory, in one table.

    python tools/bench/layouts.py

Whole runs of `python -m lctrain recipe=llama_tiny_32k`, one sequence of one document a data rank and step,
one thread a rank, alternating between layouts; speed is the median over steps after each run's first, memory the
largest resident set of the first rank. `ratio` is the step time of the zigzag ring over that of Ulysses; ring_balance
is the larger rank's (query, key) pairs over the smaller's. Takes about ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import median

from common import finish, fixed_threads

TARGET, BALANCE_TARGET = 1.15, 1.05
LENGTH, STEPS, ROUNDS = 16384, 4, 2
LAYOUTS = {
    "single": ["parallel=single"],
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "fsdp_sp": ["parallel=fsdp_sp"],
    "fsdp_cp": ["parallel=fsdp_cp"],
    "fsdp_cp allgather": ["parallel=fsdp_cp", "parallel.cp_method=allgather"],
    "fsdp_tp": ["parallel=fsdp_tp"],
    "zero1": ["parallel=zero1"],
    "zero2": ["parallel=zero2"],
    "zero3": ["parallel=zero3"],
    "zero3_sp": ["parallel=zero3_sp"],
}
DATA_RANKS = {"ddp": 2, "fsdp": 2, "zero1": 2, "zero2": 2, "zero3": 2}


def main() -> None:
    """Measure, print the table, finish."""
    records: dict[str, list[dict[str, float]]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "one.jsonl"
        text.write_text(json.dumps({"text": _text(2 * (STEPS + 1) * LENGTH)}) + "\n", encoding="utf-8")
        for number in range(ROUNDS):
            for layout, overrides in LAYOUTS.items():
                records[layout] += _run(folder / f"{layout}-{number}", layout, overrides, text)
    print("| layout | ranks | tokens/s | peak GiB of rank 0 |\n|---|---|---|---|")
    for layout, found in records.items():
        speed, peak = median(r["tokens_per_s"] for r in found), max(r["peak_memory_bytes"] for r in found)
        print(f"| {layout} | {1 if layout == 'single' else 2} | {speed:,.0f} | {peak / 2**30:.2f} |")
    ring, ulysses = (median(r["step_time_s"] for r in records[k]) for k in ("fsdp_cp", "fsdp_sp"))
    balance = _balance()
    finish(
        {
            "name": "layouts",
            "ours": ring,
            "peer": ulysses,
            "ratio": ring / ulysses,
            "target": TARGET,
            "ok": ring / ulysses <= TARGET and balance <= BALANCE_TARGET,
            "unit": "s a step, ring over Ulysses",
            "ring_balance": balance,
            "ring_balance_target": BALANCE_TARGET,
        }
    )


def _text(length: int) -> str:
    """`length` characters of the standard library's sources, all of one byte."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(p.read_text(encoding="ascii", errors="ignore") for p in sorted(folder.glob("*.py")))
    return text[:length]


def _balance() -> float:
    from lctrain.ops.attention.documents import Documents
    from lctrain.parallel.zigzag import causal_work

    work = [causal_work(Documents((0, LENGTH)), 1, rank, 2) for rank in range(2)]
    return max(work) / min(work)


def _run(run_dir: Path, layout: str, overrides: list[str], text: Path) -> list[dict[str, float]]:
    """The records of a run's steps after its first."""
    command = [
        *(sys.executable, "-m", "lctrain", "recipe=llama_tiny_32k", "data=jsonl", f"data.path={text}"),
        *overrides,
        *("data.tokenizer=byte", f"data.cache_dir={run_dir.parent}/cache", f"run_dir={run_dir}", "device=cpu"),
        *(f"data.max_length={LENGTH}", f"train.max_steps={STEPS}", "checkpoint.save_at_end=false"),
        f"train.global_batch_size={DATA_RANKS.get(layout, 1)}",
    ]
    done = subprocess.run(command, env=fixed_threads(1), stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return records[1:]


if __name__ == "__main__":
    main()
