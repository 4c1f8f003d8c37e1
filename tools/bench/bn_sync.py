"""Merging BatchNorm statistics of two ranks: one flat all-reduce against one collective per buffer.

    python tools/bench/bn_sync.py

ResNet-50 has 53 BatchNorm layers. Ours pools all of them in one message (bn.sync=pooled); the peer averages each
running mean and each running variance in a collective of its own, 106 of them, as timm's distribute_bn does. Two gloo
ranks of one thread each.
"""

from __future__ import annotations

from common import finish, paired_ratio, typical
from two_ranks import Variants, measure_between_ranks

TARGET = 0.05
ROUNDS, REPEATS = 10, 10


def main() -> None:
    """Measure."""
    blocks = measure_between_ranks(variants, rounds=ROUNDS, repeats=REPEATS)
    ratio = paired_ratio(blocks["flat"], blocks["per buffer"])
    finish(
        {
            "name": "bn_sync",
            "ours": typical(blocks["flat"]),
            "peer": typical(blocks["per buffer"]),
            "ratio": ratio,
            "target": TARGET,
            "ok": ratio <= TARGET,
            "unit": "s",
        }
    )


def variants() -> Variants:
    """On a rank: both ways of merging the same model's statistics."""
    import torch
    import torch.distributed as dist

    from lctrain.config.batch_norm import BnSync
    from lctrain.config.model import ResNetConfig
    from lctrain.models.image_model import build_image_model
    from lctrain.parallel.batch_norm import BatchNormStatistics

    model = build_image_model(ResNetConfig(), classes=1000, channels=3, image_size=32, seed=0)
    statistics = BatchNormStatistics(model, BnSync.pooled)
    buffers = [b for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))]
    assert len(buffers) == 106
    images = torch.zeros(2, 3, 32, 32)

    @torch.no_grad()
    def train() -> None:
        model(images)  # there is nothing to merge until layers have normalised something

    def flat() -> None:
        statistics.synchronise(lambda: [], model)

    def per_buffer() -> None:
        for buffer in buffers:
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()

    return {"flat": (train, flat), "per buffer": (train, per_buffer)}


if __name__ == "__main__":
    main()
