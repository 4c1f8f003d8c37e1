"""Adapters under every kind of layout: only they train and are saved, any layout continues, export merges them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config

RANK = 4
LINEAR = {
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def plain_of(size: int, *overrides: str, base: Path | None = None) -> dict[str, Any]:
    """A tied model with adapters; `base`: a folder its other weights come from."""
    plain = to_plain(
        tiny_config(
            *overrides,
            f"model.lora.rank={RANK}",
            "model.lora.alpha=32",
            f"launch.nproc_per_node={size}",
            architecture={"tie_word_embeddings": True},
        )
    )
    if base is not None:
        plain["model"] |= {"path": str(base), "init": "pretrained", "architecture": {}}
    return plain


def _whole(language: Any) -> dict[str, np.ndarray]:
    """Whole parameters: all of them, or under DeepSpeed the adapters."""
    from tests.support.run import whole_parameters

    return {name: value.float().cpu().numpy() for name, value in whole_parameters(language)}


def _train(ranks: Any, plain: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two updates, a checkpoint, a third update."""
    from lctrain.engines.sharded_state import stored_keys
    from tests.support.run import build
    from tests.support.steps import one_step

    _, language = build(ranks, plain)
    trained = [n for n, p in language.model.named_parameters() if p.requires_grad]
    before = _whole(language)
    steps = [one_step(language, step) for step in (0, 1)]
    language.engine.save(Path(folder))
    held = _whole(language)
    steps.append(one_step(language, 2))
    return {
        "trained": trained,
        "before": before,
        "held": held,
        "steps": steps,
        "keys": sorted(stored_keys(Path(folder))),
    }


def _resume(ranks: Any, plain: dict[str, Any], folder: str) -> dict[str, Any]:
    from lctrain.runtime.mesh import Mesh
    from lctrain.train.language import build_language
    from tests.support.run import build
    from tests.support.steps import one_step

    session, _ = build(ranks, plain)
    language = build_language(session, Mesh(session.resolved.sizes, session.device), init_weights=False)
    language.engine.load(Path(folder), optimizer=True)
    return {"held": _whole(language), "third": one_step(language, 2)}


LAYOUTS = [
    (1, ("parallel=single",)),
    (2, ("parallel=fsdp", "memory=full")),
    (2, ("parallel=fsdp_sp",)),
    (2, ("parallel=zero2",)),
    (2, ("parallel=zero3",)),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, what it was) of training under a layout, once."""

    @lru_cache
    def make(size: int, overrides: tuple[str, ...]) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("lora")
        return folder, pool(size).run(_train, plain=plain_of(size, *overrides), folder=str(folder))[0]

    return make


@pytest.mark.parametrize(("size", "overrides"), LAYOUTS, ids=str)
def test_only_adapters_train_and_are_saved(size: int, overrides: tuple[str, ...], trained: Any) -> None:
    _, run = trained(size, overrides)
    names = {
        f"model.model.layers.{layer}.{linear}.lora_{side}.default.weight"
        for layer in range(2)
        for linear in LINEAR
        for side in "AB"
    }
    assert set(run["trained"]) == names
    assert set(run["keys"]) == {f"model.{n}" for n in names} | {
        f"optim.{n}.{key}" for n in names for key in ("step", "exp_avg", "exp_avg_sq")
    }
    for name, value in run["held"].items():
        assert np.array_equal(value, run["before"][name]) == (name not in names), name
    # The same training as on one rank.
    _, single = trained(*LAYOUTS[0])
    np.testing.assert_allclose(run["steps"], single["steps"], rtol=1e-4)
    for name in names:
        np.testing.assert_allclose(run["held"][name], single["held"][name], atol=2e-5, err_msg=name)
    assert single["steps"][2][0] < single["steps"][0][0]


def test_the_adapted_model_starts_as_the_base(trained: Any) -> None:
    _, run = trained(*LAYOUTS[0])
    for name in run["trained"]:
        assert (".lora_B." in name) == (not run["before"][name].any()), name
    plain = plain_of(1, "parallel=single")
    plain["model"]["lora"]["rank"] = None
    base = pool(1).run(_first_loss, plain=plain)[0]
    assert run["steps"][0][0] == pytest.approx(base, rel=1e-6)


def _first_loss(ranks: Any, plain: dict[str, Any]) -> float:
    from tests.support.run import build
    from tests.support.steps import one_step

    return one_step(build(ranks, plain)[1], 0)[0]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(0, 1), (1, 4), (4, 0), (3, 2)],
    ids=["single-fsdp", "fsdp-zero3", "zero3-single", "zero2-sp"],
)
def test_another_layout_continues(writer: int, reader: int, trained: Any) -> None:
    folder, run = trained(*LAYOUTS[writer])
    size, overrides = LAYOUTS[reader]
    for result in pool(size).run(_resume, plain=plain_of(size, *overrides), folder=str(folder)):
        for name in result["held"].keys() & run["held"].keys():
            assert np.array_equal(result["held"][name], run["held"][name]), name
        np.testing.assert_allclose(result["third"], run["steps"][2], rtol=1e-4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pretrained weights, in two files."""
    from tests.support.tiny import ARCHITECTURE
    from tests.unit.models.tiny_models import export, random_model

    folder = tmp_path_factory.mktemp("base") / "model"
    changes = {k: v for k, v in ARCHITECTURE.items() if k != "model_type"}
    export(random_model("llama", seed=3, **changes | {"tie_word_embeddings": True}), folder, shard_bytes=20_000)
    return folder


def _run(ranks: Any, plain: dict[str, Any], run_dir: str) -> Any:
    """Train, leave a run directory with a checkpoint, and say what the adapted model answers."""
    import torch

    from lctrain.config.plain import from_plain
    from lctrain.models.signature import signature
    from lctrain.train.checkpoint import Identity, TrainState, save_checkpoint
    from lctrain.train.run_dir import RunDir
    from tests.support.run import build, full
    from tests.support.steps import one_step
    from tests.unit.models.tiny_models import packed_batch

    _, language = build(ranks, plain)
    weights = {n: full(p).numpy() for n, p in language.model.named_parameters() if ".lora_" not in n}
    for step in range(2):
        one_step(language, step)
    directory = RunDir(Path(run_dir))
    config = from_plain(plain)
    if ranks.is_main:
        directory.create(config)
    save_checkpoint(
        directory.checkpoints,
        TrainState(step=2),
        Identity(signature(language.hf_config, config.model.lora), {"optim": "adamw"}, 4, config.seed, "tiny"),
        write_tensors=language.engine.save,
        barrier=language.mesh.barrier,
        is_main=ranks.is_main,
        keep=1,
    )
    ids, positions, _, documents = packed_batch()
    with torch.no_grad():
        return weights, language.engine.module.logits(ids, positions, documents).numpy()


def test_export_merges_adapters_into_the_pretrained_base(base: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from lctrain.cli import Command
    from lctrain.verbs.export import run
    from tests.unit.models.tiny_models import packed_batch

    run_dir, out = tmp_path / "run", tmp_path / "out"
    plain = plain_of(2, "parallel=fsdp", base=base)
    (weights, adapted), *_ = pool(2).run(_run, plain=plain, run_dir=str(run_dir))
    stored = {n: t.numpy() for file in sorted(base.glob("*.safetensors")) for n, t in load_file(file).items()}
    loaded = {n.removeprefix("model.").replace(".base_layer.", "."): value for n, value in weights.items()}
    assert len(list(base.glob("*.safetensors"))) > 1
    assert loaded.keys() == stored.keys()
    assert all(np.array_equal(loaded[n], stored[n]) for n in stored)

    assert run(Command("export", (f"run_dir={run_dir}", f"out={out}"))) == 0
    ids, _, _, documents = packed_batch()
    exported = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").float()
    plain_base = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    assert not any("lora" in name for name, _ in exported.named_parameters())
    with torch.no_grad():
        for start, end in documents.spans():
            flat = ids.flatten()[start:end][None]
            want = adapted.reshape(-1, adapted.shape[-1])[start:end]
            np.testing.assert_allclose(exported(input_ids=flat).logits[0].numpy(), want, atol=2e-4)
            assert np.abs(plain_base(input_ids=flat).logits[0].numpy() - want).max() > 0.1
