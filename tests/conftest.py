"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# One thread a process: results do not depend on the machine, and ranks do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A busy machine must not fail a test, and a test that failed must fail again.
settings.register_profile("lctrain", deadline=None, derandomize=True)
settings.load_profile("lctrain")

_ENVIRONMENT = dict(os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test that leaves a variable behind fails itself, rather than another one that the variable misleads."""
    yield
    now = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    left = {name: now.get(name) for name in {**now, **_ENVIRONMENT} if now.get(name) != _ENVIRONMENT.get(name)}
    for name in left:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name in left})
    assert not left, f"environment variables left by this test or its fixtures: {left}"


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    yield
    from tests.support.ranks import stop_all

    stop_all()
