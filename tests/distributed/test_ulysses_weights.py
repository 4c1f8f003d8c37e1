"""Weights in sharded models: the same random numbers, the same pretrained rows, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import pool


def _random(ranks: Any, family: str, layout: str) -> tuple[str, bool, bool]:
    """(hash, equal to one process, output embedding tied) of random weights under FSDP2 or HSDP."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lctrain.models.causal_lm import build_meta, decoder_layers
    from lctrain.models.materialize import init_random, materialize_empty
    from tests.unit.models.tiny_models import config_of, random_model

    shape = (ranks.world_size,) if layout == "fsdp" else (2, ranks.world_size // 2)
    names = ("shard",) if layout == "fsdp" else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build_meta(config_of(family, vocab_size=97))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize_empty(model, torch.device("cpu"))
    digest = init_random(model, seed=3)
    single = random_model(family, seed=3)
    equal = all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), single.parameters(), strict=True))
    tied = model.model.lm_head.weight is model.model.model.embed_tokens.weight
    return digest, equal, tied


@pytest.mark.parametrize(
    ("family", "layout", "size"),
    [("llama", "fsdp", 2), ("qwen2", "fsdp", 2), ("llama", "hsdp", 4), ("llama", "fsdp", 4)],
)
def test_random_weights_do_not_depend_on_the_layout(family: str, layout: str, size: int) -> None:
    results = pool(size).run(_random, family=family, layout=layout)
    assert len({digest for digest, _, _ in results}) == 1
    for _, equal, tied in results:
        assert equal
        assert tied == (family == "qwen2")


def _pretrained(ranks: Any, folder: str) -> tuple[bool, int]:
    """(loaded equals the model that was exported, elements this rank holds of a two-rank FSDP2 model)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lctrain.models.causal_lm import build_meta, decoder_layers
    from lctrain.models.materialize import materialize_empty
    from lctrain.models.weights import load_pretrained
    from tests.unit.models.tiny_models import config_of, random_model

    mesh = init_device_mesh("cpu", (ranks.world_size,))
    model = build_meta(config_of("qwen2"))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize_empty(model, torch.device("cpu"))
    load_pretrained(model, folder)
    single = random_model("qwen2", seed=9)
    equal = all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), single.parameters(), strict=True))
    return equal, sum(p.to_local().numel() for p in model.parameters())


def test_each_rank_loads_its_own_rows(tmp_path: Path) -> None:
    from tests.unit.models.tiny_models import export, random_model

    model = random_model("qwen2", seed=9)
    export(model, tmp_path, shard_bytes=20_000)
    results = pool(2).run(_pretrained, folder=str(tmp_path))
    assert all(equal for equal, _ in results)
    assert sum(held for _, held in results) == model.size.parameters
    assert max(held for _, held in results) < 0.6 * model.size.parameters
