"""A build that a killed process began must not stop the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lctrain.engines.deepspeed_build import build_for_cpu, drop_stale_lock


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    drop_stale_lock(lock)
    with lock.open("w"):
        drop_stale_lock(lock)
        assert lock.exists()
    drop_stale_lock(lock)
    assert not lock.exists()


def test_a_build_starts_without_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() != "cpu":
        pytest.skip("DeepSpeed compiles nothing of its own where there are accelerators")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    found: list[bool] = []
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, builder.NAME, True)
    monkeypatch.setattr(type(builder), "load", lambda self: found.append((tmp_path / self.name / "lock").exists()))
    (tmp_path / builder.name).mkdir()
    (tmp_path / builder.name / "lock").touch()
    build_for_cpu()
    assert found == [False]
