"""Peak memory of one rank at a large vocabulary, against transformers' Trainer.

    python tools/bench/memory.py

The tiny Llama of sides.py with Llama 3's vocabulary (128,256) and one sequence of 8,192 tokens; both sides
recompute decoder layers. Measured, each side in a process of its own: the most that was resident during three
whole steps beyond what was resident just before the first (so: activations, loss, gradients and optimizer
state; not the weights, which are there already, nor Python and torch). The peer needs about 14 GiB.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from common import Peak, Side, finish
from sides import FITS, Case

TARGET = 0.25
CASE = Case(vocabulary=128256, rows=1, length=8192, recompute=True)
STEPS, REPEATS = 3, 3


def main() -> None:
    """Compare, or be one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", help="internal: be this side")
    side = parser.parse_args().side
    if side:
        FITS[side](CASE, Peak(STEPS))
        sys.exit("the training loop ended")
    peaks: dict[str, list[float]] = {"ours": [], "trainer": []}
    for _ in range(REPEATS):
        for name, values in peaks.items():
            values.append(Side(__file__, name, threads=2).answer())
    ours, peer = median(peaks["ours"]) / 2**30, median(peaks["trainer"]) / 2**30
    finish(
        {
            "name": "memory",
            "ours": ours,
            "peer": peer,
            "ratio": ours / peer,
            "target": TARGET,
            "ok": ours / peer <= TARGET,
            "unit": "GiB beyond what was resident before the first step",
        }
    )


if __name__ == "__main__":
    main()
