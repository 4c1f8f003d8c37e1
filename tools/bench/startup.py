"""How long the command line takes to help, and to refuse a wrong configuration.

    python tools/bench/startup.py

Seconds of whole processes, median of repeats. `peer` is `python -c "import torch, transformers"`: what
every script that imports its libraries first costs before it can say anything.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from common import finish, fixed_threads, wall_seconds

HELP_TARGET_S, ERROR_TARGET_S = 1.0, 2.0
REPEATS = 7
_LCTRAIN = [sys.executable, "-m", "lctrain"]
# Command and the exit code it must have. The second error is found by the checks across fields.
COMMANDS = {
    "help": ([*_LCTRAIN, "--help"], 0),
    "unknown key": ([*_LCTRAIN, "recipe=llama_tiny_32k", "optim.learning_rate=1"], 2),
    "wrong sizes": ([*_LCTRAIN, "recipe=llama_tiny_32k", "parallel.sp_size=3"], 2),
    "imports": ([sys.executable, "-c", "import torch, transformers"], 0),
}


def main() -> None:
    """Measure."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, (command, code) in COMMANDS.items():
            seconds[name].append(wall_seconds(lambda c=command, e=code: _run(c, e)))
    times = {name: median(values) for name, values in seconds.items()}
    error = max(times["unknown key"], times["wrong sizes"])
    finish(
        {
            "name": "startup",
            "ours": times["help"],
            "peer": times["imports"],
            "ratio": times["help"] / times["imports"],
            "target": HELP_TARGET_S,
            "ok": times["help"] <= HELP_TARGET_S and error <= ERROR_TARGET_S,
            "unit": "s; target is of ours",
            "error": error,
            "error_target": ERROR_TARGET_S,
        }
    )


def _run(command: list[str], code: int) -> None:
    done = subprocess.run(command, env=fixed_threads(1), capture_output=True, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
