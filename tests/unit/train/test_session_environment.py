"""A run on NPUs sets what its libraries read before it opens a device, and says so beside the timeouts."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from lctrain.errors import DeviceError
from lctrain.runtime import device as devices
from lctrain.runtime.device import Accelerator
from lctrain.runtime.environment import prepare_environment
from lctrain.runtime.process import Ranks
from lctrain.train import session as sessions
from lctrain.train.session import Session
from lctrain.train.stop import StopFlag
from tests.support.tiny import tiny_config


def test_what_torch_npu_would_refuse_is_refused_before_a_device_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(DeviceError, match="are both set and torch_npu accepts only one; unset PYTORCH_ALLOC_CONF"):
        Session(tiny_config("device=npu", "parallel=single"), Ranks(), dist.HashStore(), StopFlag())


def test_what_was_set_is_said_beside_the_timeouts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env: dict[str, str] = {}
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(sessions, "prepare_environment", partial(prepare_environment, env=env))
    monkeypatch.setattr(devices, "_load", lambda device_type: seen.append(dict(env)))
    monkeypatch.setattr(devices, "count", lambda device_type: 1)
    monkeypatch.setattr(Accelerator, "name", "Ascend910B3")
    config = tiny_config("device=npu", "parallel=single", "launch.timeout_s=700")
    session = Session(config, Ranks(), dist.HashStore(), StopFlag())
    assert seen == [env]
    assert env["HCCL_EXEC_TIMEOUT"] == "680"
    session.describe()
    said = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(said) if line.startswith("environment: set "))
    assert all(f"{name}={value} (" in said[first] for name, value in env.items())
    assert said[first + 1] == (
        "timeouts: collectives 700 s, HCCL connect 700 s, HCCL execution 680 s, data preparation 86400 s"
    )
