"""The report, and what the verb takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lctrain.cli import main
from lctrain.selftest.report import markdown, verdict
from lctrain.selftest.row import Row, farthest, of_all_ranks

GOOD = Row("parity", "ddp, fp32: loss", "3 steps", 1e-8, 1e-4)
BAD = Row("parity", "fsdp, fp32: loss", "3 steps", 2e-3, 1e-4)
FIGURE = Row("plan and speed", "speed", "900 tokens/s")
RESULTS = {
    "ranks": 2,
    "device": "Ascend910B3",
    "memory_bytes": 64 * 2**30,
    "seconds": 41.2,
    "versions": {"torch": "2.13.0"},
}


def test_a_report_says_what_ran_where_and_what_differs() -> None:
    text = markdown(RESULTS, [GOOD, BAD, FIGURE], ["doctor: device=npu"])
    assert (
        "1 of 2 comparisons differ: parity: fsdp, fp32: loss. 2 x Ascend910B3 (64.0 GiB each); 41 s; torch 2.13.0."
        in text
    )
    assert "| ddp, fp32: loss | ok | 1e-08, at most 0.0001; 3 steps |" in text
    assert "| fsdp, fp32: loss | **DIFFERS** | 0.002, at most 0.0001; 3 steps |" in text
    assert text.index("## parity") < text.index("## plan and speed") < text.index("doctor: device=npu")


def test_a_number_that_is_none_is_no_success() -> None:
    assert not Row("parity", "x", "", math.nan, 1.0).ok
    assert verdict([GOOD, FIGURE]) == "All 1 comparisons hold."


def test_what_is_no_number_is_the_farthest() -> None:
    assert farthest({"a": 0.5, "b": math.nan, "c": 2.0}) == ("b", math.inf)
    assert farthest({"a": 0.5, "c": 2.0}) == ("c", 2.0)


def test_a_broken_card_is_seen_whichever_it_is() -> None:
    worse, lost = replace(GOOD, error=0.5, detail="3 steps, 7"), Row("parity", "ddp, bf16", "it broke", math.inf, 0.1)
    others = [[GOOD, FIGURE], [worse, replace(FIGURE, detail="7 tokens/s"), lost, replace(lost, name="x", error=0.0)]]
    assert of_all_ranks([[GOOD, FIGURE], *others]) == [
        replace(worse, detail="rank 2: 3 steps, 7"),
        FIGURE,
        replace(lost, detail="rank 2: it broke"),
    ]
    silent = replace(GOOD, error=math.nan)
    assert not of_all_ranks([[silent], [GOOD]])[0].ok
    assert not of_all_ranks([[GOOD], [silent]])[0].ok


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel=ddp"], "parallel=ddp has no effect on selftest"),
        (["device=cpu", "launch.nproc_per_node=3"], "must be 1, 2, 4 or 8"),
        (["--print-config"], "no --print-config"),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_report_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "selftest.md").write_text("old", encoding="utf-8")
    assert main(["selftest", "device=cpu", f"run_dir={tmp_path}"]) == 2
    assert "holds a report already" in capsys.readouterr().err
    assert (tmp_path / "selftest.md").read_text(encoding="utf-8") == "old"
