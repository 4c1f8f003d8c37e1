"""Devices: every file of them loads, own ones are found, and a device that cannot is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from lctrain.config.compose import conf_dir
from lctrain.config.hardware import GIB, check_trains, hardware_called, hardware_names, load_hardware
from lctrain.config.plan import PlanConfig
from lctrain.errors import ConfigError

NAMES = sorted(path.stem for path in (conf_dir() / "hardware").glob("*.yaml"))
OWN = """
title: My card
type: cuda
memory_gib: 48
usable_gib: 46.5
peak_tflops: {bf16: 100}
bandwidth_tb_s: 0.9
link_gb_s: 32
latency_us: 15
"""


def own(folder: Path, text: str = OWN, name: str = "mine") -> str:
    """A folder for --config-dir with one device in it."""
    (folder / "hardware").mkdir(exist_ok=True)
    (folder / "hardware" / f"{name}.yaml").write_text(text)
    return str(folder)


def test_the_devices_people_ask_for_are_there() -> None:
    wanted = {"ascend910a", "ascend910b1", "ascend910b2", "ascend910b3", "ascend910c", "ascend310p"}
    assert wanted | {"h100", "h200", "a100", "v100", "cpu"} <= set(NAMES)
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_file_loads(name: str) -> None:
    device = load_hardware(name)
    assert device.name == name
    assert device.type in ("cuda", "npu", "cpu")
    assert 0 < device.usable_gib <= device.memory_gib
    assert device.usable_bytes == int(device.usable_gib * GIB)
    assert set(device.peak_tflops) <= {"bf16", "fp16", "fp32"}
    assert all(peak > 0 for peak in device.peak_tflops.values())
    assert device.bandwidth_tb_s > 0
    assert device.link_gb_s > 0
    assert device.network_gb_s > 0
    assert device.rounding >= 1
    assert device.context_gib < device.usable_gib


@pytest.mark.parametrize("name", [n for n in NAMES if n != "ascend310p"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_device_computes_in_what_its_file_has_a_peak_for(name: str, dtype: str) -> None:
    device = load_hardware(name)
    if dtype in device.peak_tflops:
        check_trains(device, dtype)
        return
    with pytest.raises(ConfigError, match=rf"precision={dtype} but .* has no {dtype} arithmetic; use precision="):
        check_trains(device, dtype)


def test_bf16_on_the_910a_is_refused_with_what_it_has() -> None:
    with pytest.raises(ConfigError) as refused:
        check_trains(load_hardware("ascend910a"), "bf16")
    assert str(refused.value) == "precision=bf16 but Ascend 910A has no bf16 arithmetic; use precision=fp16 or fp32"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_an_inference_card_is_refused_whatever_the_precision(dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.device=ascend310p: it is an inference card and cannot train"):
        check_trains(load_hardware("ascend310p"), dtype)


@pytest.mark.parametrize(
    ("name", "near"), [("ascend910b4", "ascend910b"), ("H10", "h100"), ("A100", "a100"), ("ascend910", "ascend910")]
)
def test_an_unknown_device_gets_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_hardware(name)
    message = str(refused.value)
    assert message.startswith(f"plan.device={name} is not a known device; did you mean ")
    assert near in message.split("?")[0]
    assert message.endswith(f"known are {', '.join(NAMES)}")


def test_a_name_like_no_other_gets_all_names() -> None:
    with pytest.raises(ConfigError) as refused:
        load_hardware("zzzzzz")
    assert "did you mean" not in str(refused.value)
    assert "known are" in str(refused.value)


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    folder = own(tmp_path)
    assert hardware_names(folder) == sorted([*NAMES, "mine"])
    device = load_hardware("mine", config_dir=folder)
    assert (device.title, device.usable_bytes, device.rounding) == ("My card", int(46.5 * GIB), 1)
    assert load_hardware("h100", config_dir=folder) == load_hardware("h100")
    with pytest.raises(ConfigError, match=r"plan\.device=mine is not a known device"):
        load_hardware("mine")


def test_ones_own_file_of_a_known_name_wins(tmp_path: Path) -> None:
    folder = own(tmp_path, name="h100")
    assert load_hardware("h100", config_dir=folder).title == "My card"
    assert hardware_names(folder) == NAMES
    assert load_hardware("h100").title != "My card"


def test_a_file_is_refused_for_what_it_should_not_have_and_for_what_it_lacks(tmp_path: Path) -> None:
    folder = own(tmp_path, OWN + "colour: green\n")
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: colour is not a field of a device; its fields are .*latency_us"
    ):
        load_hardware("mine", config_dir=folder)
    folder = own(tmp_path, OWN.replace("link_gb_s: 32\n", ""))
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*link_gb_s"):
        load_hardware("mine", config_dir=folder)
    folder = own(tmp_path, OWN + "name: other\n")
    with pytest.raises(ConfigError, match=r"name is not a field"):
        load_hardware("mine", config_dir=folder)


def test_the_command_line_has_the_last_word() -> None:
    device = load_hardware("ascend910b3")
    same = device.with_overrides(PlanConfig(), "bf16")
    assert same == device
    plan = PlanConfig(usable_gib=50, peak_tflops=111, bandwidth_tb_s=2.5, link_gb_s=10, latency_us=3)
    other = device.with_overrides(plan, "bf16")
    assert (other.usable_gib, other.bandwidth_tb_s, other.link_gb_s, other.latency_us) == (50, 2.5, 10, 3)
    assert other.peak_tflops == device.peak_tflops | {"bf16": 111}
    assert other.name == device.name


def test_no_latency_is_an_answer_too() -> None:
    assert load_hardware("h100").with_overrides(PlanConfig(latency_us=0.0), "bf16").latency_us == 0.0


def test_a_stated_peak_gives_a_device_no_dtype_it_has_not() -> None:
    with pytest.raises(ConfigError, match="Ascend 910A has no bf16 arithmetic"):
        load_hardware("ascend910a").with_overrides(PlanConfig(peak_tflops=10), "bf16")


def test_devices_are_known_by_what_their_vendors_call_them() -> None:
    for called, name in (("NVIDIA A800-SXM4-80GB", "a100"), ("Ascend910_9382", "ascend910c"), ("cpu (2 cores)", None)):
        found = hardware_called(called)
        assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world_size", 0),
        ("usable_gib", -1.0),
        ("peak_tflops", 0.0),
        ("bandwidth_tb_s", 0.0),
        ("link_gb_s", -2.0),
        ("dataset_size", 0.0),
        ("price_per_hour", -1.0),
        ("latency_us", -1.0),
        ("matmul_efficiency", 0.0),
        ("attention_efficiency", 1.1),
        ("memory_efficiency", 0.0),
        ("link_efficiency", 2.0),
        ("overlap", 1.5),
        ("layouts", []),
        ("layouts", "fsdp"),
    ],
)
def test_numbers_that_cannot_be(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^plan\.{field}="):
        PlanConfig(**{field: value})  # type: ignore[arg-type]


def test_one_question_at_a_time() -> None:
    with pytest.raises(ConfigError, match=r"plan\.fit=.*cannot be combined with plan\.layouts; ask one question"):
        PlanConfig(layouts="all", fit=True)
    with pytest.raises(ConfigError, match=r"plan\.calibrate=.*cannot be combined with plan\.fit"):
        PlanConfig(fit=True, calibrate=True)
