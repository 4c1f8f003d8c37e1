"""Environment variables that the device's libraries read once, when they start: our defaults, and what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lctrain.errors import DeviceError
from lctrain.runtime.ascend import transfer_problem

CONNECT, EXEC = "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"
NPU_ALLOC, ALLOC, CUDA_ALLOC = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
CONNECT_DEFAULT_S = 120  # HCCL's own; of HCCL_EXEC_TIMEOUT it is 1836 s, more than launch.timeout_s
CONNECT_LEAST_S = 600  # ranks of a large model can start this far apart
_CONNECT_MOST_S = 7200  # HCCL's limit
_EXEC_STEP_S = 68  # HCCL rounds down to a multiple on the first 910
_EXPANDABLE = "expandable_segments:True"
_ALLOC_VALUES = {
    "expandable_segments": "True|False",
    "max_split_size_mb": r"\d+",
    "garbage_collection_threshold": r"0?\.\d+",
}


@dataclass(frozen=True)
class Setting:
    """A variable that was set, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Environment:
    """What a rank's device starts with. doubts: values of the user's that will not do what they seem to.

    connect_s, exec_s: HCCL's timeouts in seconds; None without HCCL.
    """

    settings: tuple[Setting, ...] = ()
    doubts: tuple[str, ...] = ()
    connect_s: int | None = None
    exec_s: int | None = None

    def lines(self) -> list[str]:
        """What to tell the user: one line for what was set, one for each doubt."""
        said = ", ".join(f"{s.name}={s.value} ({s.why})" for s in self.settings)
        return [*([f"environment: set {said}"] if said else []), *(f"warning: {doubt}" for doubt in self.doubts)]

    def timeouts(self, timeout_s: int, prepare_timeout_s: int) -> str:
        """One line with every wait that has an end. timeout_s: the process group's; prepare_timeout_s: the data's."""
        hccl = f"HCCL connect {self.connect_s} s, HCCL execution {self.exec_s} s, " if self.connect_s else ""
        return f"timeouts: collectives {timeout_s} s, {hccl}data preparation {prepare_timeout_s} s"


def prepare_environment(device_type: str, timeout_s: int, *, env: MutableMapping[str, str] = os.environ) -> Environment:
    """Set what the user did not, before a device or a process group exists; say what was set.

    timeout_s: of the process group, whose watchdog ends the process. HCCL's own limit stays below it, so that HCCL
    can say first which rank it waits for.
    Raises DeviceError when both allocator variables of NPUs are set or one cannot be read, or a timeout is no number.
    """
    settings: list[Setting] = []

    def default(name: str, value: str, why: str, *others: str) -> None:
        if not any(other in env for other in (name, *others)):
            env[name] = value
            settings.append(Setting(name, value, why))

    if device_type == "cuda":
        default(ALLOC, _EXPANDABLE, "less is lost to fragments", CUDA_ALLOC)
    if device_type != "npu":
        return Environment(tuple(settings))
    problem = allocator_problem(env)
    if problem is not None:
        raise DeviceError(f"{problem[0]}; {problem[1]}")
    for name in (CONNECT, EXEC):
        _seconds(name, env, 0)
    default(CONNECT, str(connect_timeout(timeout_s)), f"ranks may start so far apart; HCCL's is {CONNECT_DEFAULT_S} s")
    default(EXEC, str(exec_timeout(timeout_s)), f"below launch.timeout_s={timeout_s}, so that HCCL says who is missing")
    default(NPU_ALLOC, _EXPANDABLE, "less is lost to fragments", ALLOC)
    problems = (connect_problem(env), exec_problem(timeout_s, env), transfer_problem())
    doubts = tuple("; ".join(problem) for problem in problems if problem is not None)
    return Environment(tuple(settings), doubts, int(env[CONNECT]), int(env[EXEC]))


def connect_timeout(timeout_s: int) -> int:
    """How long HCCL waits for ranks to appear, in seconds: as long as a collective, in HCCL's limits."""
    return min(max(timeout_s, CONNECT_LEAST_S), _CONNECT_MOST_S)


def exec_timeout(timeout_s: int) -> int:
    """The largest multiple of 68 s below the process group's timeout, or what is left of a very short one."""
    whole = (timeout_s - 1) // _EXEC_STEP_S * _EXEC_STEP_S
    return whole or max(1, timeout_s - 1)


def allocator_problem(env: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """(what is wrong, what mends it) when the variables of the NPU's allocator are both set, or cannot be read.

    torch_npu refuses the one, and says only `stoull` of the other.
    """
    if NPU_ALLOC not in env or ALLOC not in env:
        return next((p for name in (NPU_ALLOC, ALLOC) if (p := _unreadable(name, env.get(name, "")))), None)
    return (
        f"{NPU_ALLOC}={env[NPU_ALLOC]} and {ALLOC}={env[ALLOC]} are both set and torch_npu accepts only one",
        f"unset {ALLOC}",
    )


def _unreadable(name: str, text: str) -> tuple[str, str] | None:
    """The first part of `key:value,key:value` that is none, or whose value is of another kind than its key's."""
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, colon, value = part.partition(":")
        wanted = _ALLOC_VALUES.get(key, r".+")
        if not colon or not re.fullmatch(wanted, value):
            return f"{name}={text} cannot be read at {part}", f"write e.g. {name}={_EXPANDABLE}, or unset it"
    return None


def connect_problem(env: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """(what is wrong, what mends it) when HCCL would not wait for ranks that start apart."""
    seconds = _seconds(CONNECT, env, connect_timeout(0))
    if seconds > _CONNECT_MOST_S:
        return (
            f"{CONNECT}={seconds} is more than the {_CONNECT_MOST_S} s that HCCL takes",
            f"set {CONNECT}={_CONNECT_MOST_S} or less, or unset it",
        )
    if seconds >= CONNECT_LEAST_S:
        return None
    return (
        f"{CONNECT}={seconds} is below {CONNECT_LEAST_S} s: ranks that load or prepare for longer fail with EI0006",
        f"set {CONNECT}={CONNECT_LEAST_S} or more, or unset it",
    )


def exec_problem(timeout_s: int, env: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """(what is wrong, what mends it) when the process group's timeout does not exceed HCCL's. 0 is no limit."""
    ours = exec_timeout(timeout_s)
    seconds = _seconds(EXEC, env, ours)
    if 0 < seconds < timeout_s or seconds == ours:
        return None
    return (
        f"{EXEC}={seconds or '0 (no limit)'} is not below launch.timeout_s={timeout_s}: the watchdog ends the run "
        "before HCCL can say which rank is missing",
        f"unset {EXEC}" + (f", or set launch.timeout_s={seconds + _EXEC_STEP_S}" if seconds else ""),
    )


def _seconds(name: str, env: Mapping[str, str], default: int) -> int:
    """A timeout in seconds. Raises DeviceError when the user's is not a whole number."""
    text = env.get(name)
    if text is None:
        return default
    if not text.strip().isdigit():
        raise DeviceError(f"{name}={text} is not a whole number of seconds; set it to one, or unset it")
    return int(text)
