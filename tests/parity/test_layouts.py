"""The parity table: every layout, the same losses, gradient norms and parameters.

The right answer is computed without any of our code but the collator: a plain Hugging Face model, plain
cross entropy over the whole global batch, torch's AdamW and clipping. The data have unequal token
counts, documents of odd lengths, a shard whose labels are all ignored and a sequence without labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.run import train_tiny
from tests.support.tiny import tiny_config, tiny_data

STEPS = 3


@dataclass(frozen=True)
class Row:
    """ranks, a layout and what else differs from the reference."""

    ranks: int
    overrides: tuple[str, ...]
    tied: bool = False

    def __str__(self) -> str:
        return f"{self.ranks}-" + ",".join(self.overrides) + ("-tied" if self.tied else "")


ROWS = [
    Row(1, ("parallel=single",)),
    Row(1, ("parallel=single", "train.micro_batch_size=2")),
    Row(1, ("parallel=single", "memory=full"), tied=True),
    Row(1, ("parallel=fsdp",)),
    Row(2, ("parallel=ddp",)),
    Row(2, ("parallel=ddp", "train.micro_batch_size=2", "memory=full"), tied=True),
    Row(2, ("parallel=fsdp",)),
    Row(2, ("parallel=fsdp", "memory=full", "memory.loss_chunk_mb=1"), tied=True),
    Row(2, ("parallel=fsdp", "parallel.reshard_after_forward=false", "train.micro_batch_size=2")),
    Row(2, ("parallel=hsdp",)),
    Row(2, ("parallel=fsdp_sp",)),
    Row(2, ("parallel=fsdp_sp", "memory=full"), tied=True),
    Row(2, ("parallel=fsdp_sp", "train.micro_batch_size=2")),
    Row(4, ("parallel=ddp",)),
    Row(4, ("parallel=hsdp", "memory=full"), tied=True),
    Row(4, ("parallel=fsdp_sp", "parallel.sp_size=2", "memory=full")),
    Row(4, ("parallel=fsdp_sp", "train.micro_batch_size=2"), tied=True),
    Row(2, ("parallel=zero1",)),
    Row(2, ("parallel=zero1", "parallel.deepspeed.reduce_scatter=false"), tied=True),
    Row(2, ("parallel=zero2", "memory=full")),
    Row(2, ("parallel=zero2", "parallel.deepspeed.reduce_scatter=false"), tied=True),
    Row(2, ("parallel=zero3",)),
    Row(2, ("parallel=zero3", "parallel.deepspeed.reduce_scatter=false", "memory=full"), tied=True),
    Row(2, ("parallel=zero3_sp", "memory=full")),
    Row(2, ("parallel=zero3_offload",), tied=True),
    Row(2, ("parallel=fsdp", "parallel.offload_params=true", "memory=full")),
    Row(2, ("parallel=fsdp_sp", "parallel.offload_params=true"), tied=True),
    Row(1, ("parallel=single", "memory=selective")),
    Row(1, ("parallel=single", "memory=offload", "memory.tiled_mlp=3"), tied=True),
    Row(2, ("parallel=fsdp", "memory=offload", "memory.tiled_mlp=2")),
    Row(2, ("parallel=fsdp_sp", "memory=selective", "memory.tiled_mlp=2"), tied=True),
    Row(2, ("parallel=fsdp_cp", "memory=selective")),
    Row(2, ("parallel=fsdp_cp", "parallel.cp_method=allgather", "memory=selective")),
    Row(2, ("parallel=fsdp_tp", "memory=selective")),
    Row(2, ("parallel=fsdp_tp",)),
    Row(2, ("parallel=fsdp_tp", "memory=full", "train.micro_batch_size=2"), tied=True),
    Row(4, ("parallel=fsdp_tp", "parallel.tp_size=2", "memory=full")),
    Row(4, ("parallel=fsdp_tp", "parallel.tp_size=2"), tied=True),
    Row(2, ("parallel=fsdp_cp",)),
    Row(2, ("parallel=fsdp_cp", "train.micro_batch_size=2", "memory=full"), tied=True),
    Row(2, ("parallel=fsdp_cp", "parallel.cp_method=allgather", "train.micro_batch_size=2")),
    Row(4, ("parallel=fsdp_cp", "train.micro_batch_size=4")),
    Row(4, ("parallel=fsdp_cp", "parallel.cp_size=2", "parallel.cp_method=allgather"), tied=True),
    Row(4, ("parallel=fsdp_usp", "parallel.sp_size=2", "memory=full")),
    Row(4, ("parallel=fsdp_usp", "parallel.sp_size=2", "parallel.cp_method=allgather"), tied=True),
]


def config_of(row: Row) -> dict[str, Any]:
    """The plain config of a row."""
    overrides = [*row.overrides, f"launch.nproc_per_node={row.ranks}"]
    return to_plain(tiny_config(*overrides, architecture={"tie_word_embeddings": row.tied}))


@lru_cache
def reference(tied: bool) -> dict[str, Any]:
    """Losses, norms and parameters of a bare loop; weights start from the program's own initial ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lctrain.data.collate import collate
    from lctrain.data.order import SampleOrder

    config = tiny_config("parallel=single", architecture={"tie_word_embeddings": tied})
    start = pool(1).run(initial_parameters, plain=to_plain(config))[0]
    architecture = dict(config.model.architecture)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture.pop("model_type"), **architecture), attn_implementation="eager"
    ).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(start[f"model.{name}"]))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": rest, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-3,
        weight_decay=0.0,
    )
    data = tiny_data()
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=4)
    losses, norms = [], []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for index in order.step_indices(step).tolist():
            # One document at a time: isolation without any mask to get wrong.
            for piece in data.sample(index):
                batch = collate([[piece]], pad_id=0)
                logits = model(input_ids=batch.input_ids).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="sum")
                count += batch.count
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(total.detach()) / count)
    parameters = {f"model.{n}": p.detach().numpy().copy() for n, p in model.named_parameters()}
    return {"loss": losses, "grad_norm": norms, "parameters": parameters}


def initial_parameters(ranks: Any, plain: dict[str, Any]) -> dict[str, np.ndarray]:
    """Initial weights of a config on one rank."""
    from tests.support.run import build, full

    _, language = build(ranks, plain)
    return {n: full(p).numpy() for n, p in language.model.named_parameters()}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_fp32_equals_bare_loop(row: Row) -> None:
    right = reference(row.tied)
    results = pool(row.ranks).run(train_tiny, plain=config_of(row), steps=STEPS)
    for result in results:
        np.testing.assert_allclose(result["loss"], right["loss"], rtol=2e-5)
        np.testing.assert_allclose(result["grad_norm"], right["grad_norm"], rtol=1e-4)
        assert result["parameters"].keys() == right["parameters"].keys()
        for name, value in right["parameters"].items():
            np.testing.assert_allclose(result["parameters"][name], value, atol=2e-5, err_msg=name)
    assert right["grad_norm"][0] > 1.0, "clipping must be active for the norm to matter"


HALF = [
    Row(1, ("parallel=single",)),
    Row(2, ("parallel=ddp",)),
    Row(2, ("parallel=fsdp", "memory=full")),
    Row(2, ("parallel=fsdp_sp",)),
    Row(2, ("parallel=fsdp_cp", "memory=selective")),
    Row(2, ("parallel=fsdp_tp",)),
    Row(2, ("parallel=zero1",)),
    Row(2, ("parallel=zero2",)),
    Row(2, ("parallel=zero3", "memory=full")),
]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("row", HALF, ids=str)
def test_half_precision_is_near(row: Row, precision: str) -> None:
    right = reference(row.tied)
    row = Row(row.ranks, (*row.overrides, f"precision={precision}"), row.tied)
    result = pool(row.ranks).run(train_tiny, plain=config_of(row), steps=STEPS)[0]
    tolerance = 0.02 if precision == "bf16" else 0.004
    np.testing.assert_allclose(result["loss"], right["loss"], rtol=tolerance)
    np.testing.assert_allclose(result["grad_norm"], right["grad_norm"], rtol=5 * tolerance)
    assert all(v.dtype == np.float32 for v in result["parameters"].values())
