"""The command line: `python -m lctrain [VERB] [-m] [--config-dir DIR] key=value ...`."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from lctrain.errors import EXIT_BUG, EXIT_OK, ConfigError, LctrainError
from lctrain.runtime.ascend import failed_autoload

# verb: (module, what it does). One file a verb; the module has `run(command) -> exit code`.
VERBS = {
    "train": ("lctrain.verbs.train", "Train (the verb when none is given)."),
    "plan": ("lctrain.verbs.plan", "Memory, time and verdict of a job before any machine is booked."),
    "evaluate": ("lctrain.verbs.evaluate", "Validation loss and perplexity of a run's checkpoint or a model folder."),
    "verify": ("lctrain.verbs.verify", "Prove a layout: loss, every gradient and document isolation against one rank."),
    "stage": ("lctrain.verbs.stage", "Copy images into local shards: data.source=FOLDER|URL|NAME data.cache=DIR."),
    "doctor": ("lctrain.verbs.doctor", "Check this machine's devices, packages and environment: device=auto."),
    "selftest": ("lctrain.verbs.selftest", "Prove the program on this machine's devices, in one report."),
    "export": ("lctrain.verbs.export", "Write a run's checkpoint as a Hugging Face folder: run_dir=DIR out=OUT."),
}

_SPEAKING_S = 5.0


@dataclass(frozen=True)
class Command:
    """A parsed command line. overrides: the key=value words, in order."""

    verb: str = "train"
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    multirun: bool = False
    show_config: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(words):
            print(help_text())
            return EXIT_OK
        if "--version" in words:
            from lctrain import __version__

            print(f"lctrain {__version__}")
            return EXIT_OK
        command = parse(words)
        return int(import_module(VERBS[command.verb][0]).run(command))
    except LctrainError as error:
        _say_once(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + 2
    except BrokenPipeError:
        return EXIT_BUG
    except RuntimeError as error:
        refusal = failed_autoload(error)
        if refusal is None:
            raise
        _say_once(refusal)
        return refusal.exit_code


def _say_once(error: LctrainError) -> None:
    """Print `error`, on a node's first process only: under torchrun or accelerate all of them find the same one."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    # The launcher ends every process when one leaves, and this one must not leave before the first has spoken.
    time.sleep(_SPEAKING_S)


def parse(words: Sequence[str]) -> Command:
    """Raises ConfigError for a verb or a flag that does not exist."""
    rest = list(words)
    verb = "train"
    if rest and "=" not in rest[0] and not rest[0].startswith("-"):
        verb = rest.pop(0)
        if verb not in VERBS:
            near = difflib.get_close_matches(verb, VERBS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{verb} is not a verb; {hint}verbs are {', '.join(VERBS)}")
    overrides: list[str] = []
    config_dir: str | None = None
    multirun = show = False
    while rest:
        word = rest.pop(0)
        match word.split("=", 1):
            case ["-m" | "--multirun"]:
                multirun = True
            case ["--print-config"]:
                show = True
            case ["--config-dir" | "-cd"] if rest:
                config_dir = rest.pop(0)
            case ["--config-dir", value]:
                config_dir = value
            case [flag, *_] if flag.startswith("-"):
                raise ConfigError(
                    f"{flag} is not a flag; flags are -m, --config-dir DIR, --print-config, --help, --version"
                )
            case [key] if not key.startswith("~"):
                raise ConfigError(f"{key} has no value; write {key}=VALUE")
            case _:
                overrides.append(word)
    if multirun and verb not in ("train", "plan"):
        raise ConfigError(f"-m sweeps training runs and plans; {verb} has no sweeps, so start it once for each")
    if verb == "export" and (show or config_dir):
        raise ConfigError("export reads the configuration of its run_dir; it has no --print-config and no --config-dir")
    return Command(verb, tuple(overrides), config_dir, multirun, show)


def help_text() -> str:
    """Verbs, recipes and groups with one line each; read from the files, so nothing heavy is imported."""
    from lctrain.config.compose import options
    from lctrain.config.registry import GROUPS

    lines = ["usage: python -m lctrain [VERB] key=value ...", "", "verbs:"]
    lines += [f"  {name:<12} {text}" for name, (_, text) in VERBS.items()]
    lines += ["", "recipes (recipe=NAME):"]
    lines += [f"  {name:<16} {text}" for name, text in options("recipe").items()]
    lines += ["", "groups (GROUP=OPTION, then GROUP.field=VALUE):"]
    for group in GROUPS:
        lines.append(f"  {group}")
        lines += [f"    {name:<12} {text}" for name, text in options(group).items()]
    lines += [
        "",
        "devices (plan.device=NAME):",
        f"  {', '.join(options('hardware'))}",
        "",
        "other fields: train.*, eval.*, verify.*, plan.*, run_dir, device (auto, cuda, npu, cpu), seed, deterministic",
        "",
        "flags:",
        "  -m, --multirun    a sweep: comma-separated values make one job each",
        "  --config-dir DIR  a folder of your own groups, e.g. DIR/recipe/mine.yaml for recipe=mine",
        "  --print-config    print the resolved configuration and stop",
        "",
        "examples:",
        "  python -m lctrain recipe=llama_tiny_32k",
        "  python -m lctrain recipe=llama7b_32k parallel=fsdp_sp model.path=DIR data=jsonl data.path=FILE",
        "  accelerate launch -m lctrain recipe=llama7b_32k parallel=fsdp_sp model.path=DIR data.path=DIR",
        "  python -m lctrain plan recipe=llama7b_32k plan.layouts=all plan.device=ascend910b3 plan.world_size=8",
    ]
    return "\n".join(lines)
