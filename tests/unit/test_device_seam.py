"""No module but the runtime and the NPU's kernels names a device: everything else asks the runtime."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Kernels are written for one device; these may import torch_npu, and nothing more.
KERNELS = ("lctrain/ops/attention/npu.py", "lctrain/ops/npu_fused.py", "lctrain/ops/npu_schemas.py")
MODULES = ("cuda", "npu")


def named(source: str) -> list[tuple[int, str]]:
    """(line, what) for each mention of a device's module in code; comments and strings may name what they like."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in MODULES:
                found.append((node.lineno, f"torch.{attr}"))
            case ast.Call(func=ast.Attribute(attr=attr)) if attr in MODULES:
                found.append((node.lineno, f".{attr}("))
            case ast.Import(names=names):
                found += [(node.lineno, f"import {name.name}") for name in names if _is_device(name.name)]
            case ast.ImportFrom(module=str(module), names=names):
                imported = [module, *(f"{module}.{name.name}" for name in names)]
                found += [(node.lineno, f"import {name}") for name in imported[:2] if _is_device(name)]
            case _:
                pass
    return sorted(found)


def _is_device(module: str) -> bool:
    return module.split(".")[0] == "torch_npu" or module.startswith(tuple(f"torch.{name}" for name in MODULES))


def elsewhere() -> list[Path]:
    """Every module of the package but the runtime, and what people copy."""
    folders = [ROOT / name for name in ("lctrain", "tools", "recipes")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return [path for path in files if ROOT / "lctrain" / "runtime" not in path.parents]


def test_only_the_runtime_and_the_npus_kernels_name_device_modules() -> None:
    files = elsewhere()
    assert len(files) > 100
    for path in files:
        name = str(path.relative_to(ROOT))
        allowed = {"import torch_npu"} if name in KERNELS else set()
        found = [f"{name}:{line}: {what}" for line, what in named(path.read_text(encoding="utf-8"))]
        assert [text for text in found if text.split(": ")[1] not in allowed] == []


def test_every_kernel_on_the_list_needs_to_be_there() -> None:
    for name in KERNELS:
        assert named((ROOT / name).read_text(encoding="utf-8")), name


@pytest.mark.parametrize(
    "line",
    [
        "x = tensor.cuda()",
        "model.npu(0)",
        "torch.cuda.synchronize()",
        "n = torch.npu.device_count()",
        "if torch.cuda: pass",
        "import torch_npu",
        "import torch_npu.npu as n",
        "from torch_npu import npu_fusion_attention",
        "from torch_npu.contrib import transfer_to_npu",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import amp",
        "def f():\n    import torch_npu",
    ],
)
def test_a_planted_line_is_found(line: str) -> None:
    assert named(f"import torch\n\n{line}\n") != []


@pytest.mark.parametrize(
    "line",
    ["'torch.cuda.synchronize()'", "# import torch_npu", "x.to(device)", "torch.get_device_module('cuda')", "cuda = 1"],
)
def test_what_names_none_is_not(line: str) -> None:
    assert named(f"import torch\n\n{line}\n") == []
