"""The chunked loss against torch's, with its gradients and its memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lctrain.ops.cross_entropy import chunk_tokens_for, linear_cross_entropy
from lctrain.ops.text_batch import IGNORE


def _case(tokens: int = 37, vocabulary: int = 23, width: int = 8, *, bias: bool = False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::5] = IGNORE
    tensors = [hidden, weight] + ([torch.randn(vocabulary, generator=generator).to(dtype)] if bias else [])
    return [t.requires_grad_() for t in tensors], labels


def _torch(tensors, labels) -> torch.Tensor:
    logits = F.linear(*tensors).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def _ours(tensors, labels, chunk_tokens: int) -> torch.Tensor:
    bias = tensors[2] if len(tensors) > 2 else None
    return linear_cross_entropy(tensors[0], tensors[1], labels, bias_V=bias, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_fp32_equals_torch(bias: bool, chunk_tokens: int) -> None:
    tensors, labels = _case(bias=bias)
    loss, want = _ours(tensors, labels, chunk_tokens), _torch(tensors, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(loss * 0.37, tensors)
    for a, b in zip(grads, torch.autograd.grad(want * 0.37, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_half_precision_is_as_near_the_truth_as_torch(dtype: torch.dtype, chunk_tokens: int) -> None:
    tensors, labels = _case(200, 64, 32, bias=True, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels, ignore_index=IGNORE, reduction="sum"), exact)
    ours = torch.autograd.grad(_ours(tensors, labels, chunk_tokens) / 200, tensors)
    theirs = torch.autograd.grad(_torch(tensors, labels) / 200, tensors)
    for a, b, t, x in zip(ours, theirs, truth, tensors, strict=True):
        assert a.dtype == x.dtype
        error, allowed = (a.double() * 200 - t).norm() / t.norm(), (b.double() * 200 - t).norm() / t.norm()
        assert error < 2 * allowed + 1e-3


def test_autocast_reads_fp32_weights_in_its_dtype() -> None:
    tensors, labels = _case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _ours(tensors, labels, 8)
        mixed = _ours([tensors[0].to(torch.bfloat16), tensors[1]], labels, 8)
    low = [t.detach().to(torch.bfloat16).requires_grad_() for t in tensors]
    want = _ours(low, labels, 8)
    assert torch.equal(loss, want)
    assert torch.equal(mixed, want)
    grads = torch.autograd.grad(loss, tensors)
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    torch.testing.assert_close(grads[1], torch.autograd.grad(want, low)[1].float(), rtol=0.01, atol=0.01)


def test_fp16_sums_over_tokens_do_not_overflow() -> None:
    hidden = torch.full((4096, 4), 40.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4096) / 4096
    (grad,) = torch.autograd.grad(loss, [weight])
    torch.testing.assert_close(grad[0], torch.full((4,), -35.0, dtype=torch.float16), rtol=1e-3, atol=0)


def test_all_ignored_is_a_zero_with_a_graph() -> None:
    tensors, labels = _case(bias=True)
    loss = _ours(tensors, torch.full_like(labels, IGNORE), 8)
    assert loss.item() == 0.0
    for grad in torch.autograd.grad(loss, tensors):
        assert torch.count_nonzero(grad) == 0


def test_ignored_tokens_have_no_gradient_and_large_logits_are_finite() -> None:
    tensors, labels = _case()
    scaled = [tensors[0] * 1e4, tensors[1]]
    loss = _ours(scaled, labels, 8)
    grads = torch.autograd.grad(loss, tensors)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in grads)
    assert torch.count_nonzero(grads[0][labels == IGNORE]) == 0


def test_frozen_weight_and_no_grad() -> None:
    tensors, labels = _case()
    frozen = [tensors[0], tensors[1].detach()]
    (grad,) = torch.autograd.grad(_ours(frozen, labels, 8), [tensors[0]])
    torch.testing.assert_close(grad, torch.autograd.grad(_torch(tensors, labels), tensors)[0], rtol=1e-5, atol=5e-6)
    with torch.no_grad():
        loss = _ours(tensors, labels, 8)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _torch(tensors, labels).detach(), rtol=1e-6, atol=0)


class _Largest(TorchDispatchMode):
    """The most elements any operator returned, and how many matmuls ran."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.matmuls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        self.matmuls += "mm" in func.__name__
        return out


def test_logits_of_all_tokens_never_exist_and_no_grad_skips_their_gradient() -> None:
    tensors, labels = _case(256, 512, 8)
    with _Largest() as seen:
        _ours(tensors, labels, 16).backward()
    assert seen.elements == 16 * 512
    assert seen.matmuls == 3 * 16
    with _Largest() as seen, torch.no_grad():
        _ours(tensors, labels, 16)
    assert seen.matmuls == 16


def test_chunk_size_follows_the_budget() -> None:
    assert chunk_tokens_for(32000, 256) == 2048
    assert chunk_tokens_for(128256, 256) == 512
    assert chunk_tokens_for(2**20, 8) == 2
    assert chunk_tokens_for(2**28, 1) == 1
