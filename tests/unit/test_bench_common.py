"""tools/bench/common.py: sides take turns, drift cancels, peaks are seen, the last line is the result."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench"
_SPEC = importlib.util.spec_from_file_location("bench_common", BENCH / "common.py")
assert _SPEC is not None
assert _SPEC.loader is not None
common = importlib.util.module_from_spec(_SPEC)
sys.modules["bench_common"] = common
_SPEC.loader.exec_module(common)

SIDE = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
from common import Peak, Turns
name = sys.argv[2]
watch = Peak(2) if name == "peak" else Turns(2)
watch.begin()
while True:
    block = bytearray(b"x" * 2**26) if name == "peak" else b""
    del block
    with open({{log!r}}, "a") as stream:
        stream.write(name)
    print("noise")
    watch.step_end()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A side that writes its name at every step."""
    path = tmp_path / "side.py"
    path.write_text(SIDE.format(log=str(tmp_path / "log")))
    return path


def test_sides_never_step_at_the_same_time(script: Path) -> None:
    blocks = common.take_turns([common.Side(str(script), "a"), common.Side(str(script), "b")], rounds=2)
    assert (script.parent / "log").read_text() == "aabb" + "aabb" + "bbaa"
    assert [len(block) for block in blocks["a"] + blocks["b"]] == [2, 2, 2, 2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_peak_counts_what_a_step_freed_again(script: Path) -> None:
    peak = common.Side(str(script), "peak").answer()
    assert 2**26 <= peak < 2**26 * 2.2


def test_a_side_that_ends_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(7)")
    with pytest.raises(RuntimeError, match="exit code 7"):
        common.Side(str(broken), "a").answer()


def test_ratio_is_paired_by_round() -> None:
    """The machine slows down tenfold half way; ours costs 10% more throughout."""
    peer = [[1.0, 1.2, 1.1], [1.0, 1.0, 9.0], [10.0, 10.0, 10.0]]
    ours = [[1.1 * x for x in block] for block in peer]
    assert common.paired_ratio(ours, peer) == pytest.approx(1.1)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_last_line_and_exit_code(ok: bool, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"name": "x", "ours": 1.23456789, "peer": 2.0, "ratio": 0.5, "target": 0.9, "ok": ok}
    with pytest.raises(SystemExit) as raised:
        common.finish(result)
    assert raised.value.code == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {**result, "ours": 1.235}
