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
    """The program and its libraries set variables for their process, which here is that of the next test too."""
    yield
    for name in os.environ.keys() - _ENVIRONMENT.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(_ENVIRONMENT)


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    yield
    from tests.support.ranks import stop_all

    stop_all()
