"""The emulated cards, built once; without g++, the wheel or its torch the tests are skipped, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.npu_emulation import build
from tests.support.command import LIMIT_S, ROOT, environment, unplanned
from tests.support.ranks import RankPool, pool


@dataclass(frozen=True)
class Emulation:
    """python: an interpreter that, in `environment()`, has torch_npu and two emulated cards."""

    built: build.Built
    python: Path = Path(sys.executable)

    def variables(self) -> dict[str, str]:
        """What the emulation adds to an environment; this checkout comes first on the path."""
        found = self.built.variables()
        return found | {"PYTHONPATH": f"{ROOT}{os.pathsep}{found['PYTHONPATH']}"}

    def environment(self, **extra: str) -> dict[str, str]:
        """A whole environment for a process; an empty value of `extra` takes a variable away."""
        whole = environment(**self.variables()) | extra
        return {name: value for name, value in whole.items() if value}

    def ranks(self, size: int, **extra: str) -> RankPool:
        """A pool of processes with a card each and hccl between them."""
        return pool(size, device="npu", environment=self.variables() | extra)

    def lctrain(self, *words: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m lctrain WORDS` to its end."""
        command = [str(self.python), "-m", "lctrain", *unplanned(words)]
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


@pytest.fixture(scope="session")
def emulation() -> Emulation:
    """The emulation, or a skip that says what this machine lacks."""
    try:
        return Emulation(build.build())
    except build.Unavailable as error:
        pytest.skip(f"no emulated NPU: {error}")
