"""verify: sound layouts pass, and every way of breaking one is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lctrain.config.plain import to_plain
from lctrain.errors import EXIT_NO, EXIT_OK
from tests.support.ranks import pool
from tests.support.tiny import tiny_config


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is make(the real one) inside."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def _native_loss_twice() -> Any:
    from lctrain.engines.native import NativeEngine

    return replaced(NativeEngine, "backward", lambda real: lambda self, loss: real(self, 2 * loss))


def _deepspeed_loss_twice() -> Any:
    """What DeepSpeed's own sequence parallelism does to gradients on some stages."""
    from lctrain.engines.deepspeed import DeepSpeedEngine

    return replaced(DeepSpeedEngine, "backward", lambda real: lambda self, loss: real(self, 2 * loss))


def _fsdp_averages() -> Any:
    """FSDP2 as it is without being told to sum."""
    from torch.distributed.fsdp import FSDPModule

    return replaced(FSDPModule, "set_gradient_divide_factor", lambda real: lambda self, factor: None)


def _ddp_averages() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return replaced(DistributedDataParallel, "register_comm_hook", lambda real: lambda self, state, hook: None)


def _ring_loses_its_last_block() -> Any:
    from lctrain.parallel.blocks import Blocks

    def make(real: Any) -> Any:
        return lambda self, source: () if source == (self.rank + 1) % self.size else real(self, source)

    return replaced(Blocks, "from_source", make)


def _allgather_loses_a_chunk() -> Any:
    from lctrain.parallel import ring

    return replaced(ring, "prefix_rectangles", lambda real: lambda *args: (*real(*args)[:1], ()))


def _documents_are_ignored() -> Any:
    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.sdpa import SdpaKernel

    def forward(real: Any) -> Any:
        def blind(self: Any, q: Any, k: Any, v: Any, documents: Any, **kind: Any) -> Any:
            return real(self, q, k, v, Documents((0, documents.total)), **kind)

        return blind

    return replaced(SdpaKernel, "forward", forward)


def _verify(ranks: Any, plain: dict[str, Any], folder: str, broken: Callable[[], Any]) -> int:
    """The verify verb's work on this rank, on TinyData; its exit code."""
    import torch.distributed as dist

    from lctrain.config.plain import from_plain
    from lctrain.runtime.mesh import Mesh
    from lctrain.train.log import Log
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag
    from lctrain.train.verify_job import rank_main
    from tests.support.tiny import tiny_data

    config = from_plain(plain)
    config.run_dir = folder
    session = Session(config, ranks, dist.FileStore(f"{folder}.store", ranks.world_size), StopFlag())
    session.log = Quiet(speaks=ranks.is_main) if isinstance(session.log, Log) else session.log
    session.prepare = lambda splits: {"train": tiny_data()}  # type: ignore[assignment]
    session.connect = lambda: Mesh(session.resolved.sizes, session.device)  # type: ignore[assignment]
    with broken():
        return rank_main(session)


def Quiet(*, speaks: bool) -> Any:
    """A Log that writes its file and leaves the terminal alone."""
    from lctrain.train.log import Log

    class Silent(Log):
        def __call__(self, line: str) -> None:
            if self._speaks and self._path is not None:
                self._append([line])

    return Silent(speaks=speaks)


def verify(
    size: int, overrides: list[str], folder: Path, broken: Callable[[], Any] = _nothing
) -> tuple[set[int], dict[str, Any]]:
    """(exit codes of the ranks, verify.json)."""
    plain = to_plain(tiny_config(*overrides, f"launch.nproc_per_node={size}"))
    codes = pool(size).run(_verify, plain=plain, folder=str(folder), broken=broken)
    return set(codes), json.loads((folder / "verify.json").read_text())


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ["parallel=ddp"]),
        (2, ["parallel=fsdp_cp", "precision=bf16", "memory=selective"]),
        (2, ["parallel=fsdp_cp", "parallel.cp_method=allgather", "train.micro_batch_size=2"]),
        (2, ["parallel=fsdp_tp"]),
        (2, ["parallel=fsdp_sp", "model.lora.rank=4"]),
        (2, ["parallel=zero2"]),
        (2, ["parallel=zero3_sp", "precision=bf16"]),
        (4, ["parallel=fsdp_usp", "parallel.sp_size=2", "memory=offload"]),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_sound_layouts_pass(size: int, overrides: list[str], tmp_path: Path) -> None:
    codes, found = verify(size, overrides, tmp_path / "run")
    assert codes == {EXIT_OK}
    assert found["ok"]
    assert found["world_size"] == size
    fp32 = [c for c in found["checks"] if c["precision"] == "fp32"]
    trained = 2 * 14 if "model.lora.rank=4" in overrides else 2 * 9 + 3
    assert sum(c["name"].startswith("gradient of") for c in fp32) == trained
    assert {"loss", "gradient norm", "attention calls", "isolation", "isolation, the edit shows"} < {
        c["name"] for c in fp32
    }
    assert {c["precision"] for c in found["checks"]} == {"fp32", "bf16" if "precision=bf16" in overrides else "fp32"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["verb"], summary["metrics"]["failed"]) == ("verify", 0)
    assert "equals one rank" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("overrides", "broken", "names"),
    [
        (["parallel=ddp"], _native_loss_twice, {"gradient norm"}),
        (["parallel=fsdp"], _native_loss_twice, {"gradient norm"}),
        (["parallel=ddp"], _ddp_averages, {"gradient norm"}),
        (["parallel=fsdp_sp"], _fsdp_averages, {"gradient norm"}),
        (["parallel=zero2"], _deepspeed_loss_twice, {"gradient norm"}),
        (["parallel=zero3_sp"], _deepspeed_loss_twice, {"gradient norm"}),
        (["parallel=fsdp_cp"], _ring_loses_its_last_block, {"loss", "gradient norm"}),
        (["parallel=fsdp_cp", "parallel.cp_method=allgather"], _allgather_loses_a_chunk, {"loss", "gradient norm"}),
        (["parallel=fsdp"], _documents_are_ignored, {"loss", "isolation"}),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else getattr(x, "__name__", ""),
)
def test_what_is_broken_is_found(
    overrides: list[str], broken: Callable[[], Any], names: set[str], tmp_path: Path
) -> None:
    codes, found = verify(2, overrides, tmp_path / "run", broken)
    assert codes == {EXIT_NO}
    assert not found["ok"]
    failed = {c["name"] for c in found["checks"] if not c["ok"]}
    assert names <= failed
    assert any(name.startswith("gradient of") for name in failed)
    if names == {"gradient norm"}:  # a factor alone: by two, everywhere, and nothing else
        assert not failed & {"loss", "attention calls", "isolation"}
        norm = next(c for c in found["checks"] if c["name"] == "gradient norm")
        assert norm["error"] == pytest.approx(1.0 if "twice" in broken.__name__ else 0.5, rel=1e-3)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "DIFF" in log
    assert "differs from one rank" in log


def test_the_command_line_verifies_a_layout_with_its_data(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"Document {number}. " * (20 + 7 * number))
    run_dir = tmp_path / "run"
    words = [
        *("verify", "recipe=llama_tiny_32k", "data=text", f"data.path={texts}", f"data.cache_dir={tmp_path / 'cache'}"),
        *("data.tokenizer=byte", "verify.max_length=256", "parallel=fsdp_cp", f"run_dir={run_dir}", "device=cpu"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lctrain", *words],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1] == f"run dir: {run_dir}"
    assert "fsdp_cp on 2 ranks equals one rank" in done.stdout
    found = json.loads((run_dir / "verify.json").read_text())
    assert found["ok"]
    assert found["sizes"]["cp"] == 2
    assert all(c["error"] <= c["tolerance"] for c in found["checks"])
