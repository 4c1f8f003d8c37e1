"""What each memory option keeps, moves and runs again; the gradients never change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lctrain.config.memory import MemoryConfig, Recompute
from lctrain.errors import ModelError
from lctrain.models.causal_lm import CausalLM, decoder_layers
from lctrain.ops.attention.interface import attend_batch
from lctrain.ops.attention.sdpa import SdpaKernel
from lctrain.parallel import offload
from lctrain.parallel.recompute import apply_recompute
from tests.unit.models.tiny_models import packed_batch, random_model

LAYERS, WIDTH, INNER, TOKENS = 3, 32, 512, 2 * 24


class Counting(SdpaKernel):
    """Counts its calls."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.backwards += 1
        return super().backward(*args, **kwargs)


def model_of(memory: MemoryConfig, **changes: Any) -> tuple[CausalLM, Counting]:
    """A model laid out by `memory`, and its kernel."""
    model, kernel = random_model(num_hidden_layers=LAYERS, **changes), Counting()
    model.route_attention(partial(attend_batch, kernel))
    apply_recompute(decoder_layers(model), memory)
    return model, kernel


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    """Of one batch."""
    model(*packed_batch()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("recompute", "forwards"),
    [(Recompute.none, 1), (Recompute.selective, 1), (Recompute.full, 2), (Recompute.offload, 2)],
)
def test_attention_runs_again_only_where_it_is_not_kept(recompute: Recompute, forwards: int) -> None:
    want = gradients(model_of(MemoryConfig())[0])
    model, kernel = model_of(MemoryConfig(recompute=recompute))
    got = gradients(model)
    assert (kernel.forwards, kernel.backwards) == (forwards * LAYERS, LAYERS)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_two_batches_in_flight_do_not_mix() -> None:
    """Two forwards before their backwards, as some accumulation schemes run them."""
    ids, *rest = packed_batch()
    summed = []
    for recompute in (Recompute.none, Recompute.selective, Recompute.offload):
        model, _ = model_of(MemoryConfig(recompute=recompute))
        losses = [model(x, *rest) for x in (ids, ids.flip(1))]
        for loss in reversed(losses):
            loss.backward()
        summed.append([p.grad for p in model.parameters()])
    for other in summed[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, summed[0], strict=True))


class Live(TorchDispatchMode):
    """Bytes of tensors made inside the mode that still exist; the model's own, which have views, are not counted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._own:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def kept_a_layer(recompute: Recompute) -> float:
    """Kept by one more layer from forward to backward, in layer inputs."""
    held = []
    for layers in (1, 3):
        model = random_model(num_hidden_layers=layers)
        apply_recompute(decoder_layers(model), MemoryConfig(recompute=recompute))
        with Live(model) as live:
            loss = model(*packed_batch())
        held.append(live.bytes())
        loss.backward()
    return (held[1] - held[0]) / 2 / (TOKENS * WIDTH * 4)


def test_each_option_keeps_less_than_the_one_before() -> None:
    assert kept_a_layer(Recompute.full) == 1.0
    assert kept_a_layer(Recompute.selective) == 2.0 + 4 / WIDTH  # the output too, and the log-sum-exp of four heads
    assert kept_a_layer(Recompute.none) > 6.0
    # Beside the copy in host memory, which on the CPU is the same memory, nothing.
    assert kept_a_layer(Recompute.offload) == 1.0


def inputs_of(model: CausalLM) -> list[tuple[torch.Tensor, StorageWeakRef]]:
    """Filled in the forward pass: a copy of each layer's input, and whether the input itself still exists."""
    seen: list[tuple[torch.Tensor, StorageWeakRef]] = []

    def see(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append((args[0].detach().clone(), StorageWeakRef(args[0].untyped_storage())))

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(see)
    return seen


def test_offload_moves_layer_inputs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    fetched: list[Any] = []
    used: list[Any] = []

    def noting(method: Callable[..., Any], into: list[Any], *, result: bool) -> Callable[..., Any]:
        def call(self: Any, argument: Any) -> Any:
            out = method(self, argument)
            into.append(out if result else argument)
            return out

        return call

    host = offload.HostInputs
    monkeypatch.setattr(host, "_out", noting(host._out, moved, result=True))
    monkeypatch.setattr(host, "_fetch", noting(host._fetch, fetched, result=False))
    monkeypatch.setattr(host, "_back", noting(host._back, used, result=False))
    model, _ = model_of(MemoryConfig(recompute=Recompute.offload))
    seen = inputs_of(model)
    loss = model(*packed_batch())
    assert len(moved) == LAYERS
    for (value, original), copy in zip(seen, moved, strict=True):
        assert torch.equal(copy.host, value)
        assert original.expired()  # its memory is free between forward and backward
    loss.backward()
    assert used == moved[::-1]
    # Each is fetched once, a layer ahead of its use: with the last one's use comes the one before.
    assert fetched == moved[::-1]
    assert all(copy.device_copy is None for copy in moved)


def test_full_recompute_holds_its_inputs_where_offload_does_not() -> None:
    model, _ = model_of(MemoryConfig(recompute=Recompute.full))
    seen = inputs_of(model)
    loss = model(*packed_batch())
    assert not any(original.expired() for _, original in seen)
    loss.backward()


class WidestInner(TorchDispatchMode):
    """Most tokens of any tensor of the MLP's inner width; its weights, as many rows as the model is wide, are not."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == INNER:
                rows = tensor.numel() // INNER
                self.rows = max(self.rows, 0 if rows == WIDTH else rows)
        return out


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_a_tiled_mlp_never_holds_its_inner_activations_whole(recompute: Recompute) -> None:
    whole, _ = model_of(MemoryConfig(recompute=recompute), intermediate_size=INNER)
    tiled, _ = model_of(MemoryConfig(recompute=recompute, tiled_mlp=3), intermediate_size=INNER)
    with WidestInner() as widest:
        want = gradients(whole)
    assert widest.rows == TOKENS
    with WidestInner() as widest:
        got = gradients(tiled)
    assert widest.rows == TOKENS // 3
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=2e-5, msg=name)
    with torch.no_grad(), WidestInner() as widest:
        torch.testing.assert_close(tiled(*packed_batch()), whole(*packed_batch()), rtol=1e-6, atol=1e-6)
    assert widest.rows == TOKENS  # the whole model's; with the tiled one alone:
    with torch.no_grad(), WidestInner() as widest:
        tiled(*packed_batch())
    assert widest.rows == TOKENS // 3


@pytest.mark.parametrize("tiles", [2, 5, 100])
def test_any_number_of_tiles_gives_the_same_gradients(tiles: int) -> None:
    want = gradients(model_of(MemoryConfig())[0])
    got = gradients(model_of(MemoryConfig(tiled_mlp=tiles))[0])
    for name in want:
        # What is added in another order may differ by some roundings of the largest number that was added.
        rounding = 5e-6 * float(want[name].abs().max())
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=rounding, msg=name)


def test_a_layer_without_an_mlp_is_refused() -> None:
    with pytest.raises(ModelError, match=r"memory.tiled_mlp=2: Linear has no `mlp` to tile; set it to null"):
        apply_recompute([nn.Linear(2, 2)], MemoryConfig(tiled_mlp=2))


def test_wrapping_twice_is_an_error() -> None:
    model, _ = model_of(MemoryConfig(recompute=Recompute.full))
    with pytest.raises(AssertionError):
        apply_recompute(decoder_layers(model), MemoryConfig(recompute=Recompute.full))
