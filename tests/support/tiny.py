"""A tiny model, unequal documents and the real parts around them, for tests that need a real step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lctrain.config.compose import compose_config
from lctrain.config.root import TrainConfig

ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAX_LENGTH = 48


def tiny_config(*overrides: str, architecture: dict[str, Any] | None = None) -> TrainConfig:
    """llama_tiny_32k shrunk to ARCHITECTURE (and changes to it), fp32, constant lr without warm-up."""
    config = compose_config(
        [
            "recipe=llama_tiny_32k",
            f"data.max_length={MAX_LENGTH}",
            "train.global_batch_size=4",
            "train.max_steps=3",
            "schedule.warmup_steps=0",
            "optim.lr=0.01",
            # Large, so that Adam does not blow rounding in tiny gradients up to whole steps.
            "optim.eps=1e-3",
            "memory=none",
            *overrides,
        ]
    )
    config.model.architecture = {**ARCHITECTURE, **(architecture or {})}
    return config


@dataclass(frozen=True)
class TinyData:
    """What the loader needs of prepared data: sequences of documents of odd and unequal lengths.

    Sequence 1 has no labels in its first 40 positions (a long prompt: a shard whose labels are all
    ignored); sequence 2 has none at all; sequence 3 is shorter than the others.
    """

    rows: tuple[tuple[Any, ...], ...]
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> list[Any]:
        """The pieces of a sequence."""
        return list(self.rows[index])


@lru_cache
def tiny_data(vocab: int = 97, seed: int = 0) -> TinyData:
    """Eight sequences."""
    from lctrain.data.pieces import piece_of

    rng = np.random.default_rng(seed)
    lengths = [(7, 13, 28), (48,), (5, 11), (9, 3, 1, 2), (17, 31), (1, 47), (23, 25), (48,)]
    rows = []
    for row, parts in enumerate(lengths):
        pieces = []
        for part in parts:
            ids = rng.integers(0, vocab, part).astype(np.int32)
            mask = np.ones(part, bool)
            if row == 1:
                mask[:41] = False
            if row == 2:
                mask[:] = False
            pieces.append(piece_of(ids, mask))
        rows.append(tuple(pieces))
    return TinyData(tuple(rows))
