"""Seeds that are functions of what they are for, so that no generator state has to be saved."""

from __future__ import annotations

import hashlib


def weights_seed(seed: int) -> int:
    """The seed random weights come from, of a run's seed."""
    return derive(seed, "weights")


def derive(*parts: int | str) -> int:
    """A 63-bit seed from `parts`; the same on every machine and Python process."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
