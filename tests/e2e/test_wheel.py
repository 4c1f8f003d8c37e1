"""The wheel: the configs ship in it, and the command line works from it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command import ROOT, environment


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as an installer lays them out."""
    out = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, cwd=out, env=environment(PIP_NO_INDEX="1"))
    (wheel,) = out.glob("lctrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_every_config_is_inside(unpacked: Path) -> None:
    shipped = {p.relative_to(unpacked / "lctrain" / "conf") for p in (unpacked / "lctrain" / "conf").rglob("*.yaml")}
    assert shipped == {p.relative_to(ROOT / "conf") for p in (ROOT / "conf").rglob("*.yaml")}
    assert not (unpacked / "conf").exists()
    assert not (unpacked / "tests").exists()
    assert (unpacked / "lctrain" / "py.typed").exists() == (ROOT / "lctrain" / "py.typed").exists()


def test_the_command_line_works_from_it(unpacked: Path, tmp_path: Path) -> None:
    code = (
        "import sys, lctrain; from lctrain.cli import main; print(lctrain.__file__); "
        "print(main(['--help']), main(['recipe=llama_tiny_32k', '--print-config']))"
    )
    env = environment() | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(unpacked / "lctrain" / "__init__.py")
    assert lines[-1] == "0 0"
    assert any(line.split()[:1] == ["llama_tiny_32k"] for line in lines)
    assert "recipe: llama_tiny_32k" in lines
    (entry,) = unpacked.glob("lctrain-*.dist-info/entry_points.txt")
    assert "lctrain = lctrain.cli:main" in entry.read_text()
