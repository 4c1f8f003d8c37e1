"""Step time of the whole trainer, against a bare PyTorch loop and against transformers' Trainer.

    python tools/bench/overhead.py

One process and one thread a side, the model, documents and settings of sides.py, 2 x 1,024 tokens a step,
nothing recomputed. Ours is `Trainer.fit` with loader, metrics.jsonl, console lines and TensorBoard.

Two vocabularies. `ratio` is against the bare loop with the recipe's own byte vocabulary (320), where the
loss costs nothing and so there is nothing to win: what is left is overhead. `trainer_ratio` is against the
Trainer with Llama 2's vocabulary (32,000), where it builds whole logits as it always does. The other
two pairs are reported as well.
"""

from __future__ import annotations

import argparse
import sys

from common import Side, Turns, finish, paired_ratio, take_turns, typical
from sides import FITS, Case

TARGET, TRAINER_TARGET = 1.05, 0.95
CASES = {"bytes": Case(vocabulary=320, rows=2, length=1024), "words": Case(vocabulary=32000, rows=2, length=1024)}
STEPS = 5
ROUNDS = {"bytes": 31, "words": 11}


def main() -> None:
    """Compare, or be one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", help="internal: be this side, CASE/FIT")
    side = parser.parse_args().side
    if side:
        case, fit = side.split("/")
        FITS[fit](CASES[case], Turns(STEPS))
        sys.exit("the training loop ended")
    blocks = {}
    for case in CASES:
        blocks |= take_turns([Side(__file__, f"{case}/{fit}") for fit in FITS], ROUNDS[case])
    ratios = {
        f"{case}/{peer}": paired_ratio(blocks[f"{case}/ours"], blocks[f"{case}/{peer}"])
        for case in CASES
        for peer in ("bare", "trainer")
    }
    finish(
        {
            "name": "overhead",
            "ours": typical(blocks["bytes/ours"]),
            "peer": typical(blocks["bytes/bare"]),
            "ratio": ratios["bytes/bare"],
            "target": TARGET,
            "ok": ratios["bytes/bare"] <= TARGET and ratios["words/trainer"] <= TRAINER_TARGET,
            "unit": "s a step",
            "trainer_ours": typical(blocks["words/ours"]),
            "trainer_peer": typical(blocks["words/trainer"]),
            "trainer_ratio": ratios["words/trainer"],
            "trainer_target": TRAINER_TARGET,
            "trainer_ratio_vocabulary_320": ratios["bytes/trainer"],
            "ratio_vocabulary_32000": ratios["words/bare"],
        }
    )


if __name__ == "__main__":
    main()
