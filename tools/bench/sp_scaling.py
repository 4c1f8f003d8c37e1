"""Tokens a second at 32,768 tokens: two ranks with SP 2 against one rank, one thread a rank.

    python tools/bench/sp_scaling.py

Whole runs of `python -m lctrain recipe=llama_tiny_32k` (everything a step does: loader, forward, recompute,
backward, exchange, optimizer, logging), one sequence a step, alternating between the two layouts; the
speed is the median over steps after each run's first. Two kinds of text: every sequence one document of 32,768
tokens, which is the most attention, so `ratio`; and the recipe's packed sources, reported as
`packed_ratio`. Takes about ten minutes.
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

TARGET = 1.7
LENGTH = 32768
STEPS, ROUNDS = 3, 2
LAYOUTS = {
    "ours": ["parallel=fsdp_sp", "parallel.sp_size=2", "launch.nproc_per_node=2"],
    "peer": ["parallel=single", "launch.nproc_per_node=1"],
}


def main() -> None:
    """Measure both kinds of text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one_document = folder / "one.jsonl"
        # A few tokens short, so that those which begin and end a document make no sequence of their own.
        one_document.write_text(json.dumps({"text": _text(STEPS * LENGTH - 16)}) + "\n", encoding="utf-8")
        long = _speeds(folder / "long", ["data=jsonl", f"data.path={one_document}", "data.tokenizer=byte"])
        packed = _speeds(folder / "packed", ["data=python_stdlib", "data.held_out=0"])
    ratio = long["ours"] / long["peer"]
    finish(
        {
            "name": "sp_scaling",
            "ours": long["ours"],
            "peer": long["peer"],
            "ratio": ratio,
            "target": TARGET,
            "ok": ratio >= TARGET,
            "unit": "tokens/s; ratio at least target",
            "packed_ours": packed["ours"],
            "packed_peer": packed["peer"],
            "packed_ratio": packed["ours"] / packed["peer"],
        }
    )


def _text(length: int) -> str:
    """`length` characters of the standard library's sources, all of one byte."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(p.read_text(encoding="ascii", errors="ignore") for p in sorted(folder.glob("*.py")))
    return text[:length]


def _speeds(folder: Path, data: list[str]) -> dict[str, float]:
    """Median tokens/s of each layout."""
    speeds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for number in range(ROUNDS):
        for name, layout in LAYOUTS.items():
            speeds[name] += _run(folder / f"{name}-{number}", [*layout, *data, f"data.cache_dir={folder}/cache"])
    return {name: median(values) for name, values in speeds.items()}


def _run(run_dir: Path, overrides: list[str]) -> list[float]:
    """tokens/s of a run's steps after its first."""
    command = [
        *(sys.executable, "-m", "lctrain", "recipe=llama_tiny_32k"),
        *overrides,
        *(f"run_dir={run_dir}", f"data.max_length={LENGTH}", f"train.max_steps={STEPS}", "train.global_batch_size=1"),
        *("checkpoint.save_at_end=false", "device=cpu"),
    ]
    done = subprocess.run(command, env=fixed_threads(1), stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["tokens_per_s"] for record in records[1:]]


if __name__ == "__main__":
    main()
