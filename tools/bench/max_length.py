"""The longest sequence one rank trains within 3 GiB, beside Trainer, TRL and DeepSpeed's ALST pieces.

    python tools/bench/max_length.py

Measured is the most that a process ever had resident (VmHWM: Python, libraries, weights and all) by the end of
its second step, each step being forward, backward, clipping and AdamW. Every length is a process of its own.
The model (long_sides.py) has one layer, Llama 3's vocabulary of 128,256 and wide attention. Trainer checkpoints and
uses sdpa; TRL does too, with the loss it computes in tiles; ALST is TiledMLP and TiledFusedLogitsLoss in a bare
loop that checkpoints; ours is parallel=single memory=full memory.tiled_mlp=8 and the default loss_chunk_mb.

Peak memory is nearly a straight line in the length once the layer, and no longer the loss's fixed tile, is what
peaks. Two short lengths aim at the limit; a third run, at 96 % of where they aim, is really trained and
must fit (`trained`); the line through it and the one before gives the limit. Ratios compare limits. Takes
10 to 15 minutes on two cores, most of it attention near the limits of ALST and ours.

Every side runs with malloc told to map what is larger than 1 MiB (MALLOC_MMAP_THRESHOLD_), which is what it does
anyway from 32 MiB: freed tensors then leave the process, and holes in its heap are not counted for anyone.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from common import Side, end_side, finish, give
from long_sides import LONG_FITS, LongCase, ShortFirst

TARGET, TRAINER_TARGET = 1.0, 8.0
BUDGET = 3 * 2**30
VOCABULARY = 128256
PROBES = {"trainer": (512, 1024), "trl": (512, 1024), "alst": (3072, 6144), "ours": (3072, 6144)}
AIM = 0.96
_STEPS, _MULTIPLE = 2, 64


class Highest:
    """In a side: the Watch that gives the most ever resident, after the last step."""

    def __init__(self) -> None:
        self._left = _STEPS

    def begin(self) -> None:
        """Nothing to start."""

    def step_end(self) -> None:
        """After the last step, give the peak and end."""
        self._left -= 1
        if not self._left:
            lines = Path("/proc/self/status").read_text().splitlines()
            give(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")))
            end_side()


@dataclass
class Search:
    """One side's peaks by length, the longest length it trained, and where the budget ends."""

    name: str
    peaks: dict[int, int] = field(default_factory=dict)
    trained: int = 0
    limit: float = 0.0

    def run(self) -> None:
        """Probe, train near the limit, and draw the line again."""
        for length in PROBES[self.name]:
            self._measure(length)
        self.trained = int(AIM * self._line()) // _MULTIPLE * _MULTIPLE
        self._measure(self.trained)
        self.limit = self._line()

    @property
    def fits(self) -> bool:
        """Whether the longest run stayed within the budget."""
        return self.peaks[self.trained] <= BUDGET

    def report(self) -> dict[str, object]:
        """For the JSON line."""
        gib = {str(length): round(peak / 2**30, 3) for length, peak in self.peaks.items()}
        return {"limit": round(self.limit), "trained": self.trained, "fits": self.fits, "peak_gib": gib}

    def _line(self) -> float:
        """The length at which the line through the last two peaks meets the budget."""
        (short, low), (long, high) = list(self.peaks.items())[-2:]
        return long + (BUDGET - high) * (long - short) / (high - low)

    def _measure(self, length: int) -> None:
        side = Side(__file__, f"{self.name}/{length}", threads=2)
        self.peaks[length] = side.answer()
        print(f"{self.name}: {length:,} tokens, peak {self.peaks[length] / 2**30:.3f} GiB", file=sys.stderr)


def main() -> None:
    """Search every side's limit, or be one side at one length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", help="internal: be this side, NAME/LENGTH")
    side = parser.parse_args().side
    if side:
        _be(*side.split("/"))
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    searches = {name: Search(name) for name in PROBES}
    for search in searches.values():
        search.run()
    limits = {name: search.limit for name, search in searches.items()}
    best = max(("trl", "alst"), key=limits.__getitem__)
    ratio, trainer_ratio = limits["ours"] / limits[best], limits["ours"] / limits["trainer"]
    fits = all(search.fits for search in searches.values())
    finish(
        {
            "name": "max_length",
            "ours": round(limits["ours"]),
            "peer": round(limits[best]),
            "ratio": ratio,
            "target": TARGET,
            "ok": fits and ratio >= TARGET and trainer_ratio >= TRAINER_TARGET,
            "unit": "tokens within 3 GiB resident; ratio at least target",
            "best_peer": best,
            "trainer_ratio": trainer_ratio,
            "trainer_target": TRAINER_TARGET,
            **{f"side_{name}": search.report() for name, search in searches.items()},
        }
    )


def _be(name: str, length: str) -> None:
    kind = ShortFirst if name in ("ours", "alst") else LongCase
    overrides = ("memory.tiled_mlp=8",) if name == "ours" else ()
    case = kind(vocabulary=VOCABULARY, rows=1, length=int(length), recompute=True, overrides=overrides)
    LONG_FITS[name](case, Highest())
    sys.exit("the training loop ended")


if __name__ == "__main__":
    main()
