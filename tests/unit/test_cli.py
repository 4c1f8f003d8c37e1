"""Words on the command line: verbs, flags, who speaks, how long it takes."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lctrain import __version__, cli
from lctrain.cli import Command, parse
from lctrain.config.compose import options
from lctrain.config.registry import GROUPS
from lctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("a=1 b=2", Command(overrides=("a=1", "b=2"))),
        ("train a=1", Command(overrides=("a=1",))),
        ("evaluate run_dir=x", Command("evaluate", ("run_dir=x",))),
        ("-m a=1,2", Command(overrides=("a=1,2",), multirun=True)),
        ("a=1 --multirun", Command(overrides=("a=1",), multirun=True)),
        ("--config-dir D a=1", Command(overrides=("a=1",), config_dir="D")),
        ("a=1 --config-dir=D", Command(overrides=("a=1",), config_dir="D")),
        ("a=1 -cd D", Command(overrides=("a=1",), config_dir="D")),
        ("a=x=y ~b +c=1 ++d.e=2", Command(overrides=("a=x=y", "~b", "+c=1", "++d.e=2"))),
        ("--print-config", Command(show_config=True)),
        ("", Command()),
    ],
)
def test_parse(words: str, command: Command) -> None:
    assert parse(words.split()) == command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evalute run_dir=x", "evalute is not a verb; did you mean evaluate?"),
        ("frobnicate", "frobnicate is not a verb; verbs are train, plan, evaluate"),
        ("a=1 --fast", "--fast is not a flag; flags are -m"),
        ("a=1 --config-dir", "--config-dir is not a flag"),
        ("a=1 recipe", "recipe has no value; write recipe=VALUE"),
        ("evaluate -m run_dir=a", "-m sweeps training runs and plans; evaluate has no sweeps"),
        ("export -m run_dir=a", "-m sweeps training runs and plans; export has no sweeps"),
        ("export --print-config run_dir=a", "it has no --print-config and no --config-dir"),
        ("export --config-dir d run_dir=a", "it has no --print-config and no --config-dir"),
    ],
)
def test_words_that_mean_nothing(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    assert said in str(caught.value)


def test_help_names_every_verb_recipe_group_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["export", "--help"]):
        assert cli.main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        for name in (*cli.VERBS, *options("recipe"), *(o for group in GROUPS for o in options(group))):
            described = [line for line in lines if line.split()[:1] == [name] and len(line.split()) > 2]
            assert described, name
        assert {f"  {group}" for group in GROUPS} <= set(lines)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lctrain {__version__}\n"


def test_an_error_is_one_line_on_stderr_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe=llama_tiny_32k", "optim.lr=-1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["error: optim.lr=-1.0 must be positive; e.g. optim.lr=2e-5"]


def test_under_a_launcher_the_first_process_of_a_node_speaks_and_the_others_wait_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert cli.main(["recipe=nowhere"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines
    assert len(waited) == 1


def test_ctrl_c_while_composing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: list[str]) -> Command:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", interrupt)
    assert cli.main(["recipe=llama_tiny_32k"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_torch_that_cannot_bring_torch_npu_along_is_the_users_to_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(words: list[str]) -> Command:
        error = RuntimeError("Failed to load the backend extension: torch_npu. You can disable extension auto-loading")
        raise error from ImportError("libhccl.so: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(cli, "parse", plan)
    assert cli.main(["plan"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: device=auto but torch_npu cannot be imported (libhccl.so of CANN is not found); source"
    )
    assert line.endswith("or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run on cuda or cpu without it")


def test_any_other_runtime_error_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> Command:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "parse", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["plan"])


def test_print_config_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from lctrain.config.compose import compose_config
    from lctrain.config.plain import load

    assert cli.main(["recipe=llama_tiny_32k", "optim.lr=0.5", "--print-config"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "config.yaml") == compose_config(["recipe=llama_tiny_32k", "optim.lr=0.5"])


@pytest.mark.parametrize(
    ("words", "code", "limit_s"), [(["--help"], 0, 1.0), (["recipe=llama_tiny_32k", "optim.lrr=1"], 2, 2.0)]
)
def test_quick_enough(words: list[str], code: int, limit_s: float) -> None:
    """In CPU seconds, which other work on the machine does not lengthen; tools/bench/startup.py measures the wait."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "lctrain", *words], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= limit_s
