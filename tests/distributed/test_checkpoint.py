"""One checkpoint, every layout: what one wrote another reads, bit for bit, ties included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
from lctrain.config.registry import classes
from tests.support.ranks import pool
from tests.support.tiny import tiny_config

ARCHITECTURE = {"tie_word_embeddings": True}
NATIVE = [layout for layout in classes("parallel") if not layout.startswith("zero")]
RANKS = {"single": 1}


def plain_of(layout: str, size: int, *overrides: str) -> dict[str, Any]:
    """A tied model under a layout."""
    return to_plain(
        tiny_config(f"parallel={layout}", f"launch.nproc_per_node={size}", *overrides, architecture=ARCHITECTURE)
    )


def _initial(ranks: Any, plain: dict[str, Any]) -> dict[str, np.ndarray]:
    from tests.support.run import build
    from tests.support.steps import parameters_of

    return parameters_of(build(ranks, plain)[1])


def test_random_weights_are_the_same_under_every_layout() -> None:
    single = pool(1).run(_initial, plain=plain_of("single", 1))[0]
    for layout in NATIVE:
        if layout != "single":
            for found in pool(2).run(_initial, plain=plain_of(layout, 2)):
                assert found.keys() == single.keys(), layout
                assert all(np.array_equal(found[n], single[n]) for n in single), layout
    other = pool(1).run(_initial, plain=plain_of("single", 1, "seed=1"))[0]
    assert any(not np.array_equal(other[n], single[n]) for n in single)


def _save(ranks: Any, plain: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two steps, then a checkpoint; what it should hold."""
    from lctrain.engines.sharded_state import write
    from tests.support.run import build
    from tests.support.steps import is_tied, optimizer_state_of, parameters_of, take_steps

    _, language = build(ranks, plain)
    take_steps(language, 2)
    write(Path(folder), language.model, language.engine.optimizer)
    held = {"parameters": parameters_of(language), "optimizer": optimizer_state_of(language)}
    third = take_steps(language, 1, start=2)[0]
    return {**held, "tied": is_tied(language), "norm": third.grad_norm, "after": parameters_of(language)}


def _load(ranks: Any, plain: dict[str, Any], folder: str, again: str) -> dict[str, Any]:
    """What another layout reads, what it writes again, and its third step."""
    from lctrain.engines.sharded_state import read, write
    from lctrain.runtime.mesh import Mesh
    from lctrain.train.language import build_language
    from tests.support.run import build
    from tests.support.steps import is_tied, optimizer_state_of, parameters_of, take_steps

    session, _ = build(ranks, plain)
    mesh = Mesh(session.resolved.sizes, session.device)
    language = build_language(session, mesh, init_weights=False)
    read(Path(folder), language.model, language.engine.optimizer)
    held = {"parameters": parameters_of(language), "optimizer": optimizer_state_of(language)}
    write(Path(again), language.model, language.engine.optimizer)
    third = take_steps(language, 1, start=2)[0]
    return {**held, "tied": is_tied(language), "norm": third.grad_norm, "after": parameters_of(language)}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Equal names and equal bits."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(folder, what is in it) of a checkpoint of two fsdp ranks."""
    folder = tmp_path_factory.mktemp("fsdp")
    results = pool(2).run(_save, plain=plain_of("fsdp", 2), folder=str(folder))
    assert same(results[0]["parameters"], results[1]["parameters"])
    assert len(list(folder.glob("*.distcp"))) == 2  # each rank wrote its own shards
    return folder, results[0]


@pytest.mark.parametrize("layout", sorted(set(NATIVE) - {"fsdp_usp"}))
def test_what_fsdp_wrote_every_layout_reads_and_gives_back(
    layout: str, written: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, held = written
    assert held["tied"]
    size = RANKS.get(layout, 2)
    results = pool(size).run(_load, plain=plain_of(layout, size), folder=str(folder), again=str(tmp_path / "again"))
    back = pool(2).run(_load, plain=plain_of("fsdp", 2), folder=str(tmp_path / "again"), again=str(tmp_path / "third"))
    for result in results + back:
        assert same(result["parameters"], held["parameters"])
        assert same(result["optimizer"], held["optimizer"])
        assert result["tied"]
    # The third step goes on as if nothing had happened: exactly at the same layout, to rounding at another.
    for result in back:
        assert result["norm"] == held["norm"]
        assert same(result["after"], held["after"])
    for result in results:
        assert result["norm"] == pytest.approx(held["norm"], rel=1e-4)
        for name, value in held["after"].items():
            np.testing.assert_allclose(result["after"][name], value, atol=2e-5, err_msg=name)
