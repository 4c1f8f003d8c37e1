"""Random numbers that are functions of (seed, epoch, sample), so that no generator state exists."""

from __future__ import annotations

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, epochs: np.ndarray, samples: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) for each pair of epochs [B] and samples [B]: [B, count] float64.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started at a hash of the three keys.
    """
    key = _mix(np.array([seed % 2**64], np.uint64))
    key = _mix(key + epochs.astype(np.uint64))
    key = _mix(key + samples.astype(np.uint64))
    return (stream(key, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stream(starts: np.ndarray, count: int) -> np.ndarray:
    """The first `count` outputs of SplitMix64 from each state: [B] -> [B, count] uint64."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * _STEP
    return _mix(starts[:, None] + steps)


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
