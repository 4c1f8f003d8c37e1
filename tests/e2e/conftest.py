"""One small corpus, one cache and one run a layout, shared by all tests of the command line."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.command import lctrain

STEPS = 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests start several processes each; on a busy machine that is slow, and still no hang."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen documents of 100 to 3,000 bytes."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    for number in range(15):
        words = ["".join(rng.choices("aeinorst", k=rng.randint(1, 7))) for _ in range(20 + 40 * number)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token cache of all runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def words(texts: Path, cache: Path) -> list[str]:
    """A short run of the demo's recipe: ten steps at 256 tokens, an odd number of validation sequences."""
    return [
        "recipe=llama_tiny_32k",
        "data=text",
        f"data.path={texts}",
        f"data.cache_dir={cache}",
        "data.tokenizer=byte",
        "data.max_length=256",
        "data.held_out=0.3",
        "eval.max_sequences=7",
        f"train.max_steps={STEPS}",
        "logging.tensorboard=false",
    ]


@pytest.fixture(scope="session")
def straight(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of an undisturbed run under a layout, a checkpoint every second step; each layout runs once."""

    @lru_cache
    def run(layout: str) -> Path:
        folder = tmp_path_factory.mktemp(layout)
        saves = ["checkpoint.save_steps=2", "checkpoint.save_total_limit=9"]
        done = lctrain(*words, *saves, f"parallel={layout}", f"run_dir={folder / 'run'}", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == f"run dir: {folder / 'run'}"
        assert done.stderr == ""
        return folder / "run"

    return run
