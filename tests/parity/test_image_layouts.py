"""The parity table of image models: every layout and optimizer, the same losses, gradient norms and parameters.

The right answer is a plain loop: torch's model call, torch's cross entropy over the whole global batch, SGD and LARS
written out. Only the model, the pixels and the order come from our code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lctrain.config.plain import to_plain
from tests.support.images import image_config, train_images, write_images
from tests.support.ranks import pool

STEPS = 3
ROOT: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder / "source")
    ROOT.append(folder)
    yield
    ROOT.clear()
    reference.cache_clear()


@dataclass(frozen=True)
class Row:
    """ranks, a layout and what else differs; together: images a BatchNorm layer normalises at once."""

    ranks: int
    overrides: tuple[str, ...]
    lars: bool = False
    together: int = 2

    def __str__(self) -> str:
        return f"{self.ranks}-" + ",".join(self.overrides) + ("-lars" if self.lars else "")


SYNC = "bn.statistics=sync"
ROWS = [
    Row(1, ("parallel=single",)),
    Row(1, ("parallel=single",), lars=True),
    Row(1, ("parallel=single", "train.micro_batch_size=8", "bn.statistics=ghost", "bn.ghost_size=2")),
    Row(2, ("parallel=ddp",)),
    Row(2, ("parallel=ddp",), lars=True),
    Row(
        2,
        ("parallel=ddp", "parallel.static_graph=true", "parallel.bucket_mb=0.001", "train.micro_batch_size=4"),
        together=4,
    ),
    Row(2, ("parallel=ddp", SYNC), together=4),
    Row(2, ("parallel=fsdp",)),
    Row(2, ("parallel=fsdp",), lars=True),
    Row(2, ("parallel=fsdp", SYNC, "train.micro_batch_size=4"), together=8),
    Row(4, ("parallel=ddp", SYNC), together=8),
    Row(4, ("parallel=hsdp", "parallel.dp_replicate_size=2")),
    Row(4, ("parallel=hsdp", "parallel.dp_replicate_size=2"), lars=True),
]


def plain_of(row: Row) -> dict[str, Any]:
    """The row's configuration."""
    lars = ("optim=lars", "optim.lr=2.0", "optim.trust=0.01", "++optim.momentum=0.9") if row.lars else ()
    return to_plain(image_config(ROOT[0], *lars, *row.overrides))


@lru_cache
def reference(lars: bool, together: int) -> dict[str, Any]:
    """Losses, norms and parameters of the plain loop; BatchNorm sees `together` images at once."""
    from lctrain.config.plain import from_plain
    from lctrain.data.images.prepare import prepare_images
    from lctrain.data.order import SampleOrder
    from lctrain.models.image_model import build_image_model
    from lctrain.runtime.seed import weights_seed

    config = from_plain(plain_of(Row(1, ("parallel=single",), lars=lars)))
    store = prepare_images(config.images, split="train", report=lambda line: None)
    assert store is not None
    model = build_image_model(config.image_model, classes=6, channels=1, image_size=8, seed=weights_seed(config.seed))
    order = SampleOrder(size=len(store), seed=config.seed, global_batch_size=8)
    momenta = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    found: dict[str, Any] = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        total = 0.0
        for run in order.step_indices(step).reshape(-1, together):
            pixels = np.stack([np.frombuffer(store.image(i), np.uint8).reshape(1, 8, 8) for i in run.tolist()])
            x = (torch.from_numpy(pixels).float() / 255 - config.images.mean[0]) / config.images.std[0]
            labels = torch.tensor([store.label(i) for i in run.tolist()])
            loss = F.cross_entropy(model(x), labels, label_smoothing=0.1, reduction="sum") / 8
            loss.backward()
            total += float(loss.detach())
        found["loss"].append(total)
        found["grad_norm"].append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]
        update(model, momenta, config.optim, lars=lars)
    found["parameters"] = {n: p.detach().numpy() for n, p in model.named_parameters()}
    return found


@torch.no_grad()
def update(model: torch.nn.Module, momenta: dict[str, torch.Tensor], optim: Any, *, lars: bool) -> None:
    """SGD with momentum, or LARS's first form, written out."""
    for name, p in model.named_parameters():
        g, v = p.grad, momenta[name]
        assert g is not None
        decay = optim.weight_decay if p.dim() > 1 else 0.0
        rate = 1.0
        if lars and p.dim() > 1 and g.norm() > 0 and p.norm() > 0:
            rate = float(optim.trust * p.norm() / (g.norm() + decay * p.norm()))
        d = g + decay * p
        if lars:
            v.mul_(0.9).add_(d, alpha=optim.lr * rate)
            p.sub_(v)
        else:
            v.mul_(0.9).add_(d)
            p.sub_(v, alpha=optim.lr)
        p.grad = None


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_layout_equals_the_plain_loop(row: Row) -> None:
    right = reference(row.lars, row.together)
    for rank in pool(row.ranks).run(train_images, plain=plain_of(row)):
        assert rank["loss"] == pytest.approx(right["loss"], rel=2e-5)
        assert rank["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
        assert rank["parameters"].keys() == right["parameters"].keys()
        for name, value in rank["parameters"].items():
            np.testing.assert_allclose(value, right["parameters"][name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_half_precision_stays_near() -> None:
    right = reference(False, 2)
    half = "precision=bf16"
    for overrides in (("parallel=ddp", half), ("parallel=fsdp", half), ("parallel=ddp", "parallel.compress=bf16")):
        for rank in pool(2).run(train_images, plain=plain_of(Row(2, overrides))):
            assert rank["loss"] == pytest.approx(right["loss"], rel=0.05), overrides
            assert rank["loss"] != pytest.approx(right["loss"], rel=1e-7), overrides


def test_ranks_hold_one_set_of_statistics_after_an_evaluation() -> None:
    for overrides in (("parallel=ddp",), ("parallel=fsdp", "bn.sync=precise"), ("parallel=ddp", "bn.sync=mean")):
        first, second = pool(2).run(train_images, plain=plain_of(Row(2, overrides)))
        assert first["metrics"] == second["metrics"]
        for name, value in first["buffers"].items():
            np.testing.assert_array_equal(value, second["buffers"][name], err_msg=name)
    first, second = pool(2).run(train_images, plain=plain_of(Row(2, ("parallel=ddp", "bn.sync=none"))))
    assert any((first["buffers"][n] != second["buffers"][n]).any() for n in first["buffers"])


def test_evaluation_counts_each_image_once_on_any_number_of_ranks() -> None:
    found = [
        pool(size).run(train_images, plain=plain_of(Row(size, (layout, SYNC, f"train.micro_batch_size={8 // size}"))))[
            0
        ]
        for size, layout in ((1, "parallel=single"), (2, "parallel=ddp"), (4, "parallel=fsdp"))
    ]
    for rank in found:
        assert rank["metrics"]["eval_samples"] == 11
        assert rank["metrics"] == pytest.approx(found[0]["metrics"], rel=1e-3)
