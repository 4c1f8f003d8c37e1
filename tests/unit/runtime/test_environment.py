"""What is set before a device starts, what the user's own values do, and what is refused."""

from __future__ import annotations

import pytest

from lctrain.config.root import LaunchConfig
from lctrain.errors import DeviceError
from lctrain.runtime import ascend
from lctrain.runtime.environment import connect_timeout, exec_timeout, prepare_environment

OURS = {
    "HCCL_CONNECT_TIMEOUT": "1800",
    "HCCL_EXEC_TIMEOUT": "1768",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
}


def test_an_npu_gets_timeouts_and_the_allocator_and_says_so() -> None:
    env: dict[str, str] = {}
    found = prepare_environment("npu", 1800, env=env)
    assert env == OURS == {setting.name: setting.value for setting in found.settings}
    (line,) = found.lines()
    assert line.startswith("environment: set HCCL_CONNECT_TIMEOUT=1800 (")
    assert all(f"{name}={value} (" in line for name, value in OURS.items())
    assert found.timeouts(1800, 7) == (
        "timeouts: collectives 1800 s, HCCL connect 1800 s, HCCL execution 1768 s, data preparation 7 s"
    )


@pytest.mark.parametrize(("kind", "env"), [("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), ("cpu", {})])
def test_other_devices_get_what_they_read(kind: str, env: dict[str, str]) -> None:
    given: dict[str, str] = {}
    found = prepare_environment(kind, 1800, env=given)
    assert given == env
    assert len(found.lines()) == len(env)
    assert found.timeouts(1800, 7) == "timeouts: collectives 1800 s, data preparation 7 s"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("npu", {**OURS, "HCCL_CONNECT_TIMEOUT": "900", "HCCL_EXEC_TIMEOUT": "68"}),
        ("npu", {"HCCL_CONNECT_TIMEOUT": "600", "HCCL_EXEC_TIMEOUT": "1799", "PYTORCH_ALLOC_CONF": "a:1"}),
        ("cuda", {"PYTORCH_ALLOC_CONF": "a:1"}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
    ],
)
def test_what_the_user_set_stays(kind: str, given: dict[str, str]) -> None:
    env = dict(given)
    assert prepare_environment(kind, 1800, env=env).lines() == []
    assert env == given


def test_a_second_rank_of_the_same_environment_sets_nothing() -> None:
    env: dict[str, str] = {}
    prepare_environment("npu", 1800, env=env)
    assert prepare_environment("npu", 1800, env=env).settings == ()


@pytest.mark.parametrize("timeout_s", [1, 2, 60, 68, 69, 137, 600, 1800, 1837, 86400])
def test_hccl_gives_up_before_the_process_group_and_waits_for_ranks_as_long(timeout_s: int) -> None:
    assert 0 < exec_timeout(timeout_s) < max(timeout_s, 2)
    assert exec_timeout(timeout_s) % 68 == 0 or timeout_s <= 68
    assert 600 <= connect_timeout(timeout_s) <= 7200
    assert connect_timeout(timeout_s) >= min(timeout_s, 7200)
    assert prepare_environment("npu", timeout_s, env={}).doubts == ()


def test_the_default_timeout_is_below_hccls_own_so_ours_is_needed() -> None:
    assert exec_timeout(LaunchConfig().timeout_s) < LaunchConfig().timeout_s < 1836


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"HCCL_CONNECT_TIMEOUT": "120"}, "HCCL_CONNECT_TIMEOUT=120 is below 600 s"),
        ({"HCCL_CONNECT_TIMEOUT": "120"}, "set HCCL_CONNECT_TIMEOUT=600 or more, or unset it"),
        ({"HCCL_EXEC_TIMEOUT": "1800"}, "HCCL_EXEC_TIMEOUT=1800 is not below launch.timeout_s=1800"),
        ({"HCCL_EXEC_TIMEOUT": "1836"}, "unset HCCL_EXEC_TIMEOUT, or set launch.timeout_s=1904"),
        ({"HCCL_EXEC_TIMEOUT": "0"}, "HCCL_EXEC_TIMEOUT=0 (no limit) is not below launch.timeout_s=1800"),
    ],
)
def test_a_doubtful_value_is_kept_and_warned_about(given: dict[str, str], said: str) -> None:
    env = dict(given)
    (line,) = [text for text in prepare_environment("npu", 1800, env=env).lines() if text.startswith("warning")]
    assert said in line
    assert {name: env[name] for name in given} == given


def test_transfer_to_npu_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "transferred", lambda: True)
    (line,) = [text for text in prepare_environment("npu", 1800, env={}).lines() if text.startswith("warning")]
    assert "transfer_to_npu has been imported" in line


def test_both_allocator_variables_are_refused_on_npus_only() -> None:
    both = {"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}
    env = dict(both)
    with pytest.raises(DeviceError) as caught:
        prepare_environment("npu", 1800, env=env)
    assert str(caught.value) == (
        "PYTORCH_NPU_ALLOC_CONF=a:1 and PYTORCH_ALLOC_CONF=b:2 are both set and torch_npu accepts only one; "
        "unset PYTORCH_ALLOC_CONF"
    )
    assert caught.value.exit_code == 2
    assert env == both
    prepare_environment("cuda", 1800, env=env)


@pytest.mark.parametrize("name", ["PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_variable_that_cannot_be_read(name: str) -> None:
    for value in ("max_split_size_mb:abc", "max_split_size_mb", "expandable_segments:true", "x:1,max_split_size_mb:"):
        with pytest.raises(DeviceError, match=rf"{name}={value} cannot be read at .*; write e\.g\. {name}="):
            prepare_environment("npu", 1800, env={name: value})
    for value in ("", "max_split_size_mb:64, expandable_segments:False", "garbage_collection_threshold:0.8", "new:[1]"):
        prepare_environment("npu", 1800, env={name: value})


@pytest.mark.parametrize("name", ["HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"])
@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5"])
def test_a_timeout_that_is_no_number_is_refused(name: str, value: str) -> None:
    with pytest.raises(DeviceError, match=f"{name}={value} is not a whole number of seconds"):
        prepare_environment("npu", 1800, env={name: value})
