"""The wrapped model against transformers' own, and what its attention refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lctrain.errors import ModelError
from lctrain.models.attention import ATTENTION, AttentionRouter, attach_router
from lctrain.models.causal_lm import build_meta, causal_flops, decoder_layers, parameter_count
from lctrain.models.materialize import materialize_empty
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import attend_batch
from lctrain.ops.attention.sdpa import SdpaKernel
from lctrain.ops.text_batch import IGNORE
from tests.unit.models.tiny_models import FAMILIES, config_of, packed_batch, random_model


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_transformers_with_sdpa(family: str) -> None:
    ids, positions, labels, documents = packed_batch()
    model = random_model(family)
    loss = model(ids, positions, labels, documents)
    loss.backward()
    hf = type(model.model)._from_config(config_of(family), attn_implementation="sdpa")
    hf.load_state_dict(model.model.state_dict())
    logits = hf(input_ids=ids, position_ids=positions, use_cache=False).logits
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    theirs = dict(hf.named_parameters())
    for name, parameter in model.model.named_parameters():
        error = (parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm().clamp_min(1e-6)
        assert error < 5e-6, (name, error)
    torch.testing.assert_close(model.logits(ids, positions, documents), logits, rtol=1e-4, atol=1e-4)


def test_editing_one_document_leaves_the_others_bit_equal() -> None:
    ids, positions, _, documents = packed_batch()
    model = random_model()
    before = model.logits(ids, positions, documents)
    ids[0, 4] = (ids[0, 4] + 1) % 97
    after = model.logits(ids, positions, documents)
    assert torch.equal(before[0, 10:], after[0, 10:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, 4:10], after[0, 4:10])


def test_every_label_ignored_gives_zero_and_zero_gradients() -> None:
    ids, positions, labels, documents = packed_batch()
    model = random_model()
    loss = model(ids, positions, torch.full_like(labels, IGNORE), documents)
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_attention_runs_once_a_layer_and_documents_survive_recomputation(recompute: bool) -> None:
    ids, positions, labels, documents = packed_batch()
    model, plain = random_model(), random_model()
    router = model.route_attention(partial(attend_batch, SdpaKernel()))
    if recompute:
        for layer in decoder_layers(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    loss = model(ids, positions, labels, documents)
    assert router.calls == 2
    loss.backward()
    assert router.calls == (4 if recompute else 2)
    plain(ids, positions, labels, documents).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_meta_model_has_real_buffers_ties_and_sizes() -> None:
    model = build_meta(config_of("qwen2"))
    assert all(p.is_meta for p in model.parameters())
    assert all(not b.is_meta for b in model.buffers())
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert model.model.config._attn_implementation == ATTENTION
    assert len(decoder_layers(model)) == 2
    embedding, block = 97 * 32, 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    biases_and_norms = 2 * (32 + 16 + 16 + 2 * 32) + 32
    assert parameter_count(model) == embedding + 2 * block + biases_and_norms
    documents = Documents((0, 10, 24, 48))
    pairs = 55 + 105 + 300
    assert causal_flops(model, documents) == 6 * (embedding + 2 * block) * 48 + 12 * (2 * 32) * pairs


def test_flops_count_only_the_experts_a_token_is_sent_to() -> None:
    dense, mixture = build_meta(config_of("llama")), build_meta(config_of("mixtral"))
    router = 2 * 4 * 32
    assert mixture.size.matmul_parameters == dense.size.matmul_parameters + 2 * 3 * 32 * 48 + router


def test_bf16_model_trains_in_bf16_with_an_fp32_loss() -> None:
    ids, positions, labels, documents = packed_batch()
    model = random_model().to(torch.bfloat16)
    loss = model(ids, positions, labels, documents)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_autocast_over_fp32_weights() -> None:
    ids, positions, labels, documents = packed_batch()
    model = random_model()
    exact = model(ids, positions, labels, documents)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, positions, labels, documents)
    loss.backward()
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def _call(**changes):
    from transformers import AttentionInterface

    build_meta(config_of())
    module = torch.nn.Module()
    module.lctrain_router = AttentionRouter(partial(attend_batch, SdpaKernel()))
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), changes.pop("v", torch.randn(1, 2, 6, 8))
    arguments = {"scaling": None, "documents": Documents((0, 6)), **changes}
    mask = arguments.pop("attention_mask", None)
    return AttentionInterface()[ATTENTION](module, q, k, v, mask, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": None}, "does not pass forward's keywords"),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, "attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"softcap": 50.0}, "soft-capped"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"sliding_window": 5}, "sliding window of 5"),
        ({"is_causal": False}, "not causal"),
        ({"v": torch.randn(1, 2, 6, 4)}, "multi-head latent"),
    ],
)
def test_attention_refuses_what_it_would_ignore(changes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _call(**changes)


def test_attention_accepts_a_window_over_the_longest_document() -> None:
    out, weights = _call(sliding_window=6)
    assert out.shape == (1, 6, 4, 8)
    assert weights is None


def test_layers_without_attention_and_models_without_a_router_are_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no attention"):
        attach_router(torch.nn.Module(), [torch.nn.Linear(2, 2)], AttentionRouter(attend_batch))
    ids, positions, labels, documents = packed_batch()
    model = build_meta(config_of())
    materialize_empty(model, torch.device("cpu"))
    with pytest.raises(ModelError, match="has a router"):
        model(ids, positions, labels, documents)
