"""What is recorded of torch_npu's operators is what the package calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lctrain
from lctrain.ops import npu_schemas

SOURCES = Path(lctrain.__file__).parent


def test_every_operator_that_is_called_is_recorded() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    called = set(re.findall(r"_ops\(\)\.(\w+)", text))
    assert called == set(npu_schemas.CALLED)
    for version, signatures in npu_schemas.recorded().items():
        assert set(signatures) == called, version
        assert all(signatures[name].startswith(f"npu::{name}(") for name in called), version


def test_another_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(npu_schemas.recorded()["2.13.0"])
    monkeypatch.setattr(npu_schemas, "installed", lambda: ("2.13.0", found))
    assert npu_schemas.differences() == []
    was, found["npu_swiglu"] = found["npu_swiglu"], "npu::npu_swiglu(Tensor input) -> Tensor"
    found["npu_rms_norm"] = ""
    rms, swiglu = npu_schemas.differences()
    assert "npu_rms_norm of torch_npu 2.13.0 is not there" in rms
    assert swiglu.endswith(f"is npu::npu_swiglu(Tensor input) -> Tensor, and was {was} in 2.13.0")


def test_an_unknown_version_is_compared_with_the_newest_and_can_be_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {name: f"npu::{name}()" for name in npu_schemas.CALLED}
    file = tmp_path / "schemas.json"
    file.write_text(npu_schemas.RECORDED.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(npu_schemas, "RECORDED", file)
    monkeypatch.setattr(npu_schemas, "installed", lambda: ("2.9.0", found))
    assert len(npu_schemas.differences()) == len(npu_schemas.CALLED)
    assert npu_schemas.record() == "2.9.0"
    assert npu_schemas.differences() == []
    assert list(npu_schemas.recorded()) == ["2.9.0", "2.13.0"]
