"""Validation loss equals a loss worked out by hand, each sequence once, on any number of ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config, tiny_data


@lru_cache
def by_hand(sequences: int) -> tuple[float, int]:
    """(mean loss, tokens) with a plain Hugging Face model, one document at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lctrain.data.collate import collate
    from tests.parity.test_layouts import initial_parameters

    config = tiny_config("parallel=single")
    start = pool(1).run(initial_parameters, plain=to_plain(config))[0]
    architecture = dict(config.model.architecture)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture.pop("model_type"), **architecture), attn_implementation="eager"
    ).double()
    total, count, tokens = 0.0, 0, 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(start[f"model.{name}"]))
        for index in range(sequences):
            for piece in tiny_data().sample(index):
                batch = collate([[piece]], pad_id=0)
                logits = model(input_ids=batch.input_ids).logits[0]
                total += torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="sum").item()
                count, tokens = count + batch.count, tokens + batch.tokens
    return total / count, tokens


def _evaluate(ranks: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Metrics of this rank, twice with a step in between, and whether the model was put back to training."""
    from lctrain.train.evaluate import evaluate
    from tests.support.run import build
    from tests.support.steps import take_steps

    _, language = build(ranks, plain)
    data = tiny_data()

    def run() -> dict[str, float]:
        return evaluate(language.engine, language.objective, language.eval_batches(data), language.mesh)

    first = run()
    assert language.model.training
    take_steps(language, 1)
    return {"first": first, "second": run()}


LAYOUTS = [
    (1, ["parallel=single"]),
    (1, ["parallel=single", "train.micro_batch_size=2"]),
    (2, ["parallel=ddp"]),
    (2, ["parallel=ddp", "train.micro_batch_size=2"]),
    (2, ["parallel=fsdp", "memory=full"]),
    (2, ["parallel=hsdp"]),
    (2, ["parallel=fsdp_sp", "memory=full"]),
    (2, ["parallel=fsdp_sp", "train.micro_batch_size=2"]),
    (2, ["parallel=fsdp_cp"]),
    (2, ["parallel=fsdp_tp"]),
]


@pytest.mark.parametrize("sequences", [7, 3])
@pytest.mark.parametrize(("size", "overrides"), LAYOUTS, ids=lambda x: ",".join(x) if isinstance(x, list) else str(x))
def test_equals_by_hand(size: int, overrides: list[str], sequences: int) -> None:
    loss, tokens = by_hand(sequences)
    limit = [f"eval.max_sequences={sequences}", f"launch.nproc_per_node={size}"]
    results = pool(size).run(_evaluate, plain=to_plain(tiny_config(*overrides, *limit)))
    for result in results:
        assert result["first"]["eval_loss"] == pytest.approx(loss, rel=2e-6)
        assert result["first"]["eval_perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
        assert result["first"]["eval_tokens"] == tokens
        assert result["second"]["eval_loss"] != pytest.approx(loss, rel=1e-4)  # training went on between the two
        assert result == results[0]
