"""An image model on two ranks: continued runs, overflow, compressed gradients, the moving average."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lctrain.config.plain import to_plain
from tests.support.images import build_images, image_config, image_trainer, train_images, write_images
from tests.support.ranks import pool
from tests.support.run import Recorder, full

ROOT: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder / "source")
    ROOT.append(folder)
    yield
    ROOT.clear()


def plain_of(*overrides: str) -> dict[str, Any]:
    """The tiny job with these changes."""
    return to_plain(image_config(ROOT[0], *overrides))


def _tensors(job: Any) -> dict[str, Any]:
    """Weights, statistics, optimizer state and average, whole, as numpy."""
    module, optimizer = job.engine.module, job.engine.optimizer
    named = dict(module.named_parameters())
    found = {**named, **dict(module.named_buffers())}
    found |= {f"optim.{n}.{k}": v for n, p in named.items() for k, v in optimizer.state[p].items() if v is not None}
    found |= {} if job.ema is None else {f"ema.{n}": t for n, t in job.ema.tensors.items()}
    return {name: full(value).numpy() for name, value in found.items()}


class Kept(Recorder):
    """Learning rates and evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.own: list[float] = []
        self.evaluations: list[dict[str, float]] = []

    def step_end(self, record: Any) -> None:
        """Keep."""
        super().step_end(record)
        self.rates.append(record.lr)
        self.own.append(record.own_loss)

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Keep."""
        self.evaluations.append(metrics)


def _straight_and_continued(ranks: Any, plain: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Six steps with a checkpoint after three of the 3.75 of an epoch; and the last three, continued from it."""
    import copy

    from lctrain.train.checkpoint import TrainState

    runs = []
    states: dict[int, TrainState] = {}
    for start in (0, 3):
        session, job, splits = build_images(ranks, plain)
        recorder = Kept()

        def save(state: TrainState, job: Any = job, start: int = start) -> None:
            job.before_save()
            if start == 0 and state.step == 3:
                states[3] = copy.deepcopy(state)
                job.engine.save(Path(folder))

        state = TrainState()
        if start:
            job.engine.load(Path(folder), optimizer=True)
            job.engine.load_scale_state(states[3].loss_scale)
            state = states[3]
        trainer = image_trainer(
            session, job, splits, steps=6, recorder=recorder,
            save=save, save_steps=3, eval_due=lambda step: step == 5, state=state,
        )  # fmt: skip
        assert trainer.fit() == "completed"
        lists = {n: getattr(recorder, n)[3 - start :] for n in ("losses", "norms", "rates", "evaluations")}
        lists["evaluations"] = recorder.evaluations
        runs.append({"lists": lists, "units": trainer.state.units, "tensors": _tensors(job)})
    return runs


CONTINUED = [
    ("parallel=ddp", "classification.ema_decay=0.9", "classification.mixup=0.3"),
    ("parallel=ddp", "optim=lars", "optim.form=nesterov", "precision=fp16", "bn.sync=mean"),
    ("parallel=fsdp", "optim=lars", "classification.ema_decay=0.9", "bn.sync=precise", "bn.precise_batches=3"),
    ("parallel=ddp", "bn.statistics=sync", "data.crop=padded", "data.flip=true"),
]


@pytest.mark.parametrize("overrides", CONTINUED, ids=",".join)
def test_a_run_continued_in_the_middle_of_an_epoch_is_the_same_run(overrides: tuple[str, ...], tmp_path: Path) -> None:
    schedule = ("schedule=polynomial", "schedule.warmup_epochs=1")
    plain = plain_of(*schedule, *overrides)
    for straight, continued in pool(2).run(_straight_and_continued, plain=plain, folder=str(tmp_path)):
        assert straight["lists"] == continued["lists"]
        assert len(straight["lists"]["losses"]) == 3
        assert len(set(straight["lists"]["rates"])) == 3
        assert straight["units"] == continued["units"] == 48
        assert straight["tensors"].keys() == continued["tensors"].keys()
        assert any(n.startswith("ema.") for n in straight["tensors"]) == any("ema" in o for o in overrides)
        for name, value in straight["tensors"].items():
            np.testing.assert_array_equal(value, continued["tensors"][name], err_msg=name)


def _overflow(ranks: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Three steps, the second with activations and a loss that overflow on the last rank only."""
    from lctrain.data.order import SampleOrder

    _, job, splits = build_images(ranks, plain)
    engine, results, scales, weights = job.engine, [], [], []
    order = SampleOrder(size=len(splits["train"]), seed=0, global_batch_size=8)
    for step, micro in job.loader(splits["train"], order).iterate(0, 3):
        spoiled = step == 1 and ranks.rank == ranks.world_size - 1
        hook = job.model.bn1.register_forward_pre_hook(lambda _, x: (x[0] * 1e9,)) if spoiled else None
        for i, batch in enumerate(micro):
            with engine.microstep(last=i == len(micro) - 1):
                loss = job.objective.loss_sum(engine.model, job.objective.shard(batch)) / 8
                engine.backward(loss * 1e9 if spoiled else loss)
        if hook is not None:
            hook.remove()
        results.append(engine.step(0.1))
        if not results[-1].skipped:
            job.step_done(step + 1)
        scales.append(engine.scale.value)
        weights.append(_tensors(job))
    return {"skipped": [r.skipped for r in results], "scales": scales, "weights": weights}


@pytest.mark.parametrize(
    ("overrides", "scales"),
    [
        (("parallel=ddp", "precision=fp16", "precision.initial_scale=64"), [64, 32, 32]),
        (("parallel=fsdp", "precision=fp16", "precision.initial_scale=64", "optim=lars"), [64, 32, 32]),
        (("parallel=ddp", "parallel.compress=fp16", "classification.ema_decay=0.9"), [1, 1, 1]),
    ],
    ids=["ddp", "fsdp-lars", "fp16 messages"],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(overrides: tuple[str, ...], scales: list[float]) -> None:
    # Half precision ends at 65,504; the spoiled loss is some hundred million.
    results = pool(2).run(_overflow, plain=plain_of(*overrides))
    for result in results:
        assert result["skipped"] == [False, True, False]
        assert result["scales"] == scales
        first, second, third = result["weights"]
        trained = [n for n in first if "running" not in n and "tracked" not in n]
        # The running statistics too, which the forward had filled with infinities in half precision.
        assert all(np.array_equal(first[n], second[n]) for n in first)
        assert all(np.isfinite(value).all() for value in third.values())
        assert any(not np.array_equal(second[n], third[n]) for n in trained)
        for name in (n for n in trained if "optim" not in n):
            assert np.isfinite(third[name]).all()
            np.testing.assert_array_equal(third[name], results[0]["weights"][2][name], err_msg=name)


def _gradients(ranks: Any, plain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """This rank's own gradients of a batch, and what DDP makes of them."""
    from lctrain.data.order import SampleOrder

    _, job, splits = build_images(ranks, plain)
    order = SampleOrder(size=len(splits["train"]), seed=0, global_batch_size=8)
    _, micro = next(iter(job.loader(splits["train"], order).iterate(0, 1)))
    found = {}
    for name, last in (("own", False), ("summed", True)):
        with job.engine.microstep(last=last):
            job.engine.backward(job.objective.loss_sum(job.engine.model, job.objective.shard(micro[0])) / 8)
        found[name] = {n: g.float().numpy().copy() for n, g in job.engine.gradients()}
        job.engine.optimizer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_summed_in_the_dtype_of_messages(dtype: torch.dtype) -> None:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    plain = plain_of("parallel=ddp", f"parallel.compress={names[dtype]}", "train.micro_batch_size=4")
    first, second = pool(2).run(_gradients, plain=plain)
    assert len(first["own"]) > 20
    for name, mine in first["own"].items():
        parts = [torch.from_numpy(g).to(dtype) for g in (mine, second["own"][name])]
        expected = (parts[0] + parts[1]).float().numpy()
        assert np.abs(expected).max() > 0
        for rank in (first, second):
            np.testing.assert_array_equal(rank["summed"][name], expected, err_msg=name)


def test_the_averages_statistics_become_one_and_are_layout_free() -> None:
    rows = [("parallel=ddp",), ("parallel=fsdp",), ("parallel=ddp", "bn.sync=precise", "bn.precise_batches=5")]
    found = [
        pool(2).run(_average, plain=plain_of(*row, "classification.ema_decay=0.9", "data.workers=0")) for row in rows
    ]
    for first, second in found:
        assert first.keys() == second.keys()
        for name, value in first["tensors"].items():
            np.testing.assert_array_equal(value, second["tensors"][name], err_msg=name)
        assert first["metrics"] == second["metrics"]
    ddp, fsdp, precise = (rank[0] for rank in found)
    assert ddp["metrics"] == pytest.approx(fsdp["metrics"], rel=1e-5)
    assert ddp["metrics"]["ema_eval_loss"] != ddp["metrics"]["eval_loss"]
    for name, value in ddp["tensors"].items():
        np.testing.assert_allclose(value, fsdp["tensors"][name], rtol=1e-3, atol=1e-5, err_msg=name)
    # Recomputed under the average's weights, not under the model's.
    name = next(n for n in precise["tensors"] if n.startswith("ema.layer3") and n.endswith("running_var"))
    assert not np.allclose(precise["tensors"][name], precise["tensors"][name.removeprefix("ema.")], rtol=1e-3)
    assert not np.allclose(precise["tensors"][name], ddp["tensors"][name], rtol=1e-3)


def _average(ranks: Any, plain: dict[str, Any]) -> dict[str, Any]:
    session, job, splits = build_images(ranks, plain)
    trainer = image_trainer(session, job, splits, steps=4, recorder=Recorder())
    trainer.fit()
    return {"metrics": trainer.metrics, "tensors": {n: v for n, v in _tensors(job).items() if "optim" not in n}}


def test_sync_batch_norms_statistics_are_those_of_one_rank() -> None:
    one = pool(1).run(train_images, plain=plain_of("parallel=single", "train.micro_batch_size=8"))[0]
    for rank in pool(2).run(train_images, plain=plain_of("bn.statistics=sync", "train.micro_batch_size=4")):
        for name, value in one["buffers"].items():
            np.testing.assert_allclose(rank["buffers"][name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def _own_losses(ranks: Any, plain: dict[str, Any]) -> tuple[list[float], list[float]]:
    session, job, splits = build_images(ranks, plain)
    recorder = Kept()
    image_trainer(session, job, splits, steps=2, recorder=recorder).fit()
    return recorder.own, recorder.losses


def test_ranks_losses_average_to_the_jobs() -> None:
    (first, losses), (second, _) = pool(2).run(_own_losses, plain=plain_of())
    assert first != pytest.approx(second, rel=1e-3)
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(losses, rel=1e-6)


def _recomputed_at_the_end(ranks: Any, plain: dict[str, Any]) -> list[int]:
    """Images of each micro-batch that statistics are recomputed over when the data's limit is reached."""
    from lctrain.data.order import SampleOrder

    _, job, splits = build_images(ranks, plain)
    order = SampleOrder(size=len(splits["train"]), seed=0, global_batch_size=8, limit=30)
    job.loader(splits["train"], order)
    job.step_done(3)
    return [batch.count for batch in job._training_batches()]


def test_statistics_are_recomputed_over_images_even_at_the_end_of_the_last_epoch() -> None:
    plain = plain_of("bn.sync=precise", "bn.precise_batches=7")
    assert pool(2).run(_recomputed_at_the_end, plain=plain) == [[2] * 7] * 2
