"""The classification objective by hand: sums, smoothing, mixup, padding, top-1 and top-5."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lctrain.config.classification import ClassificationConfig
from lctrain.objectives.classification import ClassificationObjective
from lctrain.ops.image_batch import IGNORE, ImageBatch

MESH: Any = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cpu")))


def objective(**options: float) -> ClassificationObjective:
    """On the CPU."""
    return ClassificationObjective(MESH, ClassificationConfig(**options), mean=[0.5], std=[0.25], flops=10.0)


def batch(labels: list[int], classes: int = 6) -> tuple[ImageBatch, Any, torch.Tensor]:
    """A batch, a model that ignores its pixels, and the logits it gives."""
    torch.manual_seed(0)
    logits = torch.randn(len(labels), classes)
    images = torch.zeros(len(labels), 2, 2, 1, dtype=torch.uint8)
    return ImageBatch(images, torch.tensor(labels)), lambda x: logits + 0 * x.sum(), logits


def test_pixels_are_normalised_on_the_device() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    assert objective().normalise(images).flatten().tolist() == pytest.approx([-2.0, 2.0])
    assert objective().normalise(torch.zeros(2, 4, 5, 1, dtype=torch.uint8)).shape == (2, 1, 4, 5)


def test_padding_counts_for_nothing() -> None:
    part, model, logits = batch([3, IGNORE, 1])
    work = objective().work(part)
    assert (work.count, work.units, work.flops) == (2, 2, 20.0)
    expected = F.cross_entropy(logits[[0, 2]], torch.tensor([3, 1]), reduction="sum")
    torch.testing.assert_close(objective().loss_sum(model, part), expected)
    assert objective().eval_sums(model, part)[0].item() == pytest.approx(expected.item())


def test_smoothing() -> None:
    part, model, logits = batch([3])
    log = logits.log_softmax(-1)[0]
    expected = -(0.9 * log[3] + 0.1 * log.mean())
    torch.testing.assert_close(objective(label_smoothing=0.1).loss_sum(model, part), expected)
    # Validation is without smoothing.
    assert objective(label_smoothing=0.1).eval_sums(model, part)[0].item() == pytest.approx(-log[3].item())


def test_first_and_first_five() -> None:
    part, model, logits = batch([0, 0, 0, 0])
    ranks = (logits > logits[:, :1]).sum(-1)
    sums = objective().eval_sums(model, part).tolist()
    assert sums[1:] == [int((ranks == 0).sum()), int((ranks < 5).sum())]
    metrics = objective().eval_metrics([4 * math.log(6), 1, 3], 4)
    assert metrics == pytest.approx({"eval_loss": math.log(6), "top1": 0.25, "top5": 0.75})
    assert objective().eval_metrics([0.0, 0, 0], 0)["top1"] == 0.0


def test_mixup_mixes_images_and_losses_by_one_share() -> None:
    images = torch.arange(2, dtype=torch.uint8).reshape(2, 1, 1, 1) * 255
    seen = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.flatten())
        return torch.stack([x.flatten(), -x.flatten()], -1)

    torch.manual_seed(3)
    share = torch.distributions.Beta(0.4, 0.4).sample()
    torch.manual_seed(3)
    loss = objective(mixup=0.4).loss_sum(model, ImageBatch(images, torch.tensor([0, 1])))
    mixed = torch.stack([-2 * share + 2 * (1 - share), 2 * share - 2 * (1 - share)])
    torch.testing.assert_close(seen[0], mixed)
    logits = torch.stack([mixed, -mixed], -1)
    expected = share * F.cross_entropy(logits, torch.tensor([0, 1]), reduction="sum")
    expected = expected + (1 - share) * F.cross_entropy(logits, torch.tensor([1, 0]), reduction="sum")
    torch.testing.assert_close(loss, expected)
