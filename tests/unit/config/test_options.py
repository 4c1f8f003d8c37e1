"""Every option of every group composes with every recipe, and survives the file a worker reads."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from lctrain.config.compose import compose_config, conf_dir, options
from lctrain.config.model import CausalLMConfig
from lctrain.config.plain import from_plain, load, save, to_plain
from lctrain.config.registry import GROUPS, classes
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError

RECIPES = sorted(options("recipe"))
OF_IMAGES = {"model": ("lenet", "resnet"), "data": ("images",)}
ROUNDS = max(len(options(group)) for group in GROUPS)


@lru_cache
def composed(recipe: str, number: int) -> TrainConfig:
    """`recipe` with the number-th option of every group that fits it; the last round has used every such option."""
    language = isinstance(compose_config([f"recipe={recipe}"]).model, CausalLMConfig)
    chosen = []
    for group in GROUPS:
        if group in ("model", "optim", "schedule") and recipe.startswith("resnet"):
            continue  # it sets fields that others have not
        names = [n for n in options(group) if group not in OF_IMAGES or (n in OF_IMAGES[group]) != language]
        chosen.append(f"{group}={names[number % len(names)]}")
    return compose_config([f"recipe={recipe}", *chosen])


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_composes_and_survives_the_file(recipe: str, number: int, tmp_path: Path) -> None:
    config = composed(recipe, number)
    save(config, tmp_path / "config.yaml")
    again = load(tmp_path / "config.yaml")
    assert again == config
    assert [type(getattr(again, group)) for group in GROUPS] == [type(getattr(config, group)) for group in GROUPS]
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_every_class_has_an_option_and_every_option_a_description() -> None:
    for group in GROUPS:
        recipes = ("llama_tiny_32k", "lenet_fashion_mnist")
        found = {type(getattr(composed(recipe, number), group)) for recipe in recipes for number in range(ROUNDS)}
        assert found == set(GROUPS[group]), group
        assert all(options(group).values()), group
    assert {p.name for p in conf_dir().iterdir() if p.is_dir()} == {*GROUPS, "recipe", "preset", "hardware"}


def test_recipes_carry_their_own_name_and_a_line_about_themselves() -> None:
    for recipe, line in options("recipe").items():
        assert composed(recipe, 0).recipe == recipe
        assert line


def test_a_file_that_was_changed_by_hand_is_checked() -> None:
    plain = to_plain(composed("llama_tiny_32k", 0))
    for change, said in (
        ({"colour": 1}, "colour is not a field of the configuration"),
        ({"parallel": {"kind": "warp"}}, "parallel.kind=warp is unknown; it is one of single"),
        ({"train": {"steps": 1}}, "train.steps is not a field of train"),
        ({"device": "tpu"}, "device=tpu is unknown; it is one of auto"),
    ):
        with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
            from_plain({**plain, **change})


def test_kinds_are_unique_in_a_group() -> None:
    assert all(len(classes(group)) == len(members) for group, members in GROUPS.items())


HEAVY = ("torch", "transformers", "datasets", "numpy", "accelerate", "hydra", "tensorboard")


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import lctrain.cli", ()),
        ("import lctrain.cli; lctrain.cli.help_text()", ()),
        ("import lctrain.config.compose, lctrain.config.resolve", ()),
        (
            "from lctrain.config import compose, resolve\n"
            "resolve.resolve(compose.compose_config(['recipe=llama_tiny_32k']))",
            ("hydra",),
        ),
        ("from lctrain import cli; assert cli.main(['recipe=llama_tiny_32k', 'optim.lr=-1']) == 2", ("hydra",)),
        ("from lctrain import cli; assert cli.main(['recipe=llama_tiny_32k', '--print-config']) == 0", ("hydra",)),
    ],
)
def test_nothing_slow_is_imported(code: str, allowed: tuple[str, ...]) -> None:
    code += f"\nimport sys; print('heavy:', *[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split()[1:] == list(allowed)
