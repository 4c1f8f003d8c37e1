"""ZeRO: one checkpoint for both engines, DeepSpeed's own options, and what contradicts the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lctrain.config.deepspeed import deepspeed_json
from lctrain.config.plain import to_plain
from lctrain.config.resolve import resolve
from lctrain.engines import build as engines
from lctrain.errors import ConfigError
from tests.support.ranks import pool
from tests.support.tiny import tiny_config


def plain_of(size: int, *overrides: str) -> dict[str, Any]:
    """A model of odd sizes, which ranks do not divide, with tied embeddings."""
    architecture = {"tie_word_embeddings": True, "intermediate_size": 51}
    return to_plain(tiny_config(*overrides, f"launch.nproc_per_node={size}", architecture=architecture))


def _held(language: Any) -> dict[str, np.ndarray]:
    from tests.support.run import whole_parameters

    return {name: value.float().cpu().numpy() for name, value in whole_parameters(language)}


def _write(ranks: Any, plain: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two updates, a checkpoint, and a third update."""
    from tests.support.run import build
    from tests.support.steps import one_step

    _, language = build(ranks, plain)
    first = [one_step(language, step)[0] for step in (0, 1)]
    language.engine.save(Path(folder))
    held = _held(language)
    loss, norm = one_step(language, 2)
    return {"first": first, "held": held, "loss": loss, "norm": norm, "after": _held(language)}


def _read(ranks: Any, plain: dict[str, Any], folder: str, again: str) -> dict[str, Any]:
    """What a fresh engine reads, written again, and its third update."""
    from lctrain.runtime.mesh import Mesh
    from lctrain.train.language import build_language
    from tests.support.run import build
    from tests.support.steps import one_step

    session, _ = build(ranks, plain)
    language = build_language(session, Mesh(session.resolved.sizes, session.device), init_weights=False)
    language.engine.load(Path(folder), optimizer=True)
    held = _held(language)
    language.engine.save(Path(again))
    loss, norm = one_step(language, 2)
    return {"held": held, "loss": loss, "norm": norm, "after": _held(language)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, what it holds) of a checkpoint of two ranks under a layout, written once."""
    made: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}

    def make(*overrides: str) -> tuple[Path, dict[str, Any]]:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[overrides] = folder, pool(2).run(_write, plain=plain_of(2, *overrides), folder=str(folder))[0]
        return made[overrides]

    return make


def _optimizer_state(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint's optimizer, whole."""
    import torch

    from lctrain.engines.sharded_state import OPTIM, read_tensors, stored_keys

    state = {name: torch.zeros(meta.size) for name, meta in stored_keys(folder).items() if name.startswith(OPTIM)}
    read_tensors(folder, state)
    return {name: value.numpy() for name, value in state.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Equal names and equal bits."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    ("writer", "size", "reader"),
    [
        ("zero3", 1, "single"),
        ("zero3", 2, "fsdp"),
        ("zero3", 1, "zero3"),  # another number of ranks
        ("zero1", 2, "fsdp"),
        ("zero1", 2, "zero3_sp"),
        ("zero3_offload", 2, "zero2"),
        ("fsdp", 2, "zero1"),
        ("fsdp", 2, "zero3"),
        ("fsdp_cp", 2, "zero3_offload"),
    ],
)
def test_one_engine_continues_the_other(writer: str, size: int, reader: str, written: Any, tmp_path: Path) -> None:
    folder, wrote = written(f"parallel={writer}")
    assert wrote["first"][1] < wrote["first"][0]
    read = pool(size).run(
        _read, plain=plain_of(size, f"parallel={reader}"), folder=str(folder), again=str(tmp_path / "again")
    )
    for result in read:
        assert same(result["held"], wrote["held"])
        assert result["loss"] == pytest.approx(wrote["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(wrote["norm"], rel=1e-4)
        for name, value in wrote["after"].items():
            np.testing.assert_allclose(result["after"][name], value, atol=2e-5, err_msg=name)
    # There and back: what the reader wrote holds the same bits.
    want, got = _optimizer_state(folder), _optimizer_state(tmp_path / "again")
    assert any(name.endswith(".exp_avg_sq") for name in want)
    assert same(got, want)


@pytest.mark.parametrize(("writer", "reader"), [("zero3", "fsdp"), ("fsdp", "zero3"), ("zero1", "zero2")])
def test_half_precision_continues_from_fp32_masters(writer: str, reader: str, written: Any, tmp_path: Path) -> None:
    folder, wrote = written(f"parallel={writer}", "precision=bf16")
    plain = plain_of(2, f"parallel={reader}", "precision=bf16")
    for result in pool(2).run(_read, plain=plain, folder=str(folder), again=str(tmp_path / "again")):
        assert same(result["held"], wrote["held"])
        assert any(np.any(v != v.astype(np.float16).astype(np.float32)) for v in result["held"].values())
        assert result["loss"] == pytest.approx(wrote["loss"], rel=0.01)
        for name, value in wrote["after"].items():
            np.testing.assert_allclose(result["after"][name], value, atol=5e-3, err_msg=name)


def _overflow(ranks: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """A good step, one whose gradient overflows on the last rank only, and a good one; then a fresh engine's scale."""
    from tests.support.run import build
    from tests.support.steps import take_steps

    def spoil(step: int, loss: Any) -> Any:
        return loss * float("inf") if step == 1 and ranks.rank == ranks.world_size - 1 else loss

    _, language = build(ranks, plain)
    results, scales, parameters = [], [], []
    for step in range(3):
        results += take_steps(language, 1, start=step, spoil=spoil)
        scales.append(language.engine.scale_state()["value"])
        parameters.append(_held(language))
    fresh = build(ranks, plain)[1].engine
    fresh.load_scale_state(language.engine.scale_state())
    return {
        "skipped": [r.skipped for r in results],
        "norms": [r.grad_norm for r in results],
        "scales": [*scales, fresh.scale_state()["value"]],
        "good_steps": [language.engine.scale_state()["good_steps"], fresh.scale_state()["good_steps"]],
        "parameters": parameters,
    }


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_all_ranks_skip_an_overflow_together_and_the_scale_is_carried_on(layout: str) -> None:
    plain = plain_of(2, f"parallel={layout}", "precision=fp16", "precision.initial_scale=64")
    for result in pool(2).run(_overflow, plain=plain):
        assert result["skipped"] == [False, True, False]
        assert [np.isfinite(n) for n in result["norms"]] == [True, False, True]
        assert result["scales"] == [64, 32, 32, 32]
        assert result["good_steps"] == [1, 1]
        first, second, third = result["parameters"]
        assert same(first, second)
        assert not same(second, third)
        assert all(np.isfinite(v).all() for v in third.values())


def deepspeed_of(tmp_path: Path, found: Any, *overrides: str) -> dict[str, Any]:
    """What DeepSpeed would be given for a job on two ranks whose `parallel.deepspeed.config` holds `found`."""
    path = tmp_path / "ds.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    config = tiny_config("parallel=zero2", f"parallel.deepspeed.config={path}", "launch.nproc_per_node=2", *overrides)
    resolved = resolve(config)
    return deepspeed_json(config, accumulation=resolved.accumulation, ranks=resolved.sizes.world)


def test_a_file_that_agrees_is_merged(tmp_path: Path) -> None:
    found = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 100},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 1000, "overlap_comm": "auto"},
        "comms_logger": {"enabled": True},
    }
    got = deepspeed_of(tmp_path, found, "precision=bf16")
    assert (got["train_batch_size"], got["gradient_accumulation_steps"]) == (4, 2)
    assert got["bf16"]["enabled"] is True
    assert "fp16" not in got
    assert got["zero_optimization"]["allgather_bucket_size"] == 1000
    assert got["zero_optimization"]["overlap_comm"] is False
    assert got["comms_logger"] == {"enabled": True}


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"train_batch_size": 64}, r"train_batch_size=64 contradicts the job's 4.*set train.global_batch_size"),
        ({"train_micro_batch_size_per_gpu": 8}, r"per_gpu=8 contradicts the job's 1.*set train.micro_batch_size"),
        ({"gradient_accumulation_steps": 7}, r"steps=7 contradicts the job's 2.*set train.global_batch_size"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping=0.5 contradicts the job's 1.0.*set train.max_grad_norm"),
        ({"optimizer": {"type": "AdamW"}}, r"optimizer=.*AdamW.*contradicts the job; set optim=..."),
        ({"scheduler": {"type": "WarmupLR"}}, r"scheduler=.*WarmupLR.*contradicts the job; set schedule=..."),
        ({"fp16": {"enabled": True}}, r"fp16=.*contradicts the job; set precision=fp16"),
        ({"bf16": {"enabled": True}}, r"bf16=.*contradicts the job; set precision=bf16"),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization.stage=3 contradicts the job's 2.*parallel=zero1"),
        ("{not json", r"cannot be read.*give a JSON file"),
        ("[1]", r"is not a JSON object; give a DeepSpeed JSON file"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_file_that_contradicts_the_job_is_refused(tmp_path: Path, found: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        deepspeed_of(tmp_path, found)
    assert str(tmp_path / "ds.json") in str(refused.value)


def test_a_file_turning_off_the_jobs_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bf16.*enabled.*False.*precision=bf16"):
        deepspeed_of(tmp_path, {"bf16": {"enabled": False}}, "precision=bf16")
    assert "bf16" not in deepspeed_of(tmp_path, {"bf16": {"enabled": False}})


def test_a_missing_file_is_refused() -> None:
    config = tiny_config("parallel=zero3", "parallel.deepspeed.config=/nowhere/ds.json")
    with pytest.raises(ConfigError, match=r"parallel.deepspeed.config=/nowhere/ds.json does not exist; give"):
        deepspeed_json(config, accumulation=1, ranks=1)


@pytest.mark.parametrize(
    ("extra", "mend"),
    [
        ("train_batch_size:64", "train.global_batch_size"),
        ("train_micro_batch_size_per_gpu:2", "train.micro_batch_size"),
        ("gradient_accumulation_steps:1", "train.global_batch_size"),
        ("gradient_clipping:auto", "train.max_grad_norm"),
        ("optimizer:{type:Adam}", "optim="),
        ("bf16:{enabled:true}", "precision=bf16"),
    ],
)
def test_extra_keys_the_trainer_owns_are_refused(extra: str, mend: str) -> None:
    config = tiny_config("parallel=zero1", f"++parallel.deepspeed.extra={{{extra}}}")
    key = extra.split(":")[0]
    with pytest.raises(ConfigError, match=rf"parallel.deepspeed.extra.{key} is the trainer's to decide; set {mend}"):
        deepspeed_json(config, accumulation=1, ranks=1)


def test_other_extra_keys_reach_deepspeed() -> None:
    with pytest.raises(ConfigError, match=r"deepspeed.extra is not set yet; add keys.* \+\+parallel.deepspeed.extra="):
        tiny_config("parallel=zero1", "parallel.deepspeed.extra={zero_optimization:{round_robin_gradients:true}}")
    config = tiny_config(
        "parallel=zero1", "++parallel.deepspeed.extra={zero_optimization:{round_robin_gradients:true}}"
    )
    got = deepspeed_json(config, accumulation=1, ranks=1)
    assert got["zero_optimization"]["round_robin_gradients"] is True
    assert got["zero_optimization"]["stage"] == 1
    config = tiny_config("parallel=zero1", "++parallel.deepspeed.extra={zero_optimization:{stage:3}}")
    with pytest.raises(ConfigError, match=r"extra: zero_optimization.stage=3 contradicts the job's 1"):
        deepspeed_json(config, accumulation=1, ranks=1)


def test_without_deepspeed_its_layouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(tiny_config("parallel=zero3", "launch.nproc_per_node=2"))
    engines.check_engine(resolved)
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"parallel=zero3 needs DeepSpeed, which is not installed; pip install"):
        engines.check_engine(resolved)
    engines.check_engine(resolve(tiny_config("parallel=fsdp", "launch.nproc_per_node=2")))
