"""Every storage and every operation of a piece of a program, on real or fake tensors.

Sizes come from tensors as they are made and freed, so a trace knows what Python and autograd keep alive; scratch
memory that a kernel takes and returns inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lctrain.plan.cost import Operation, cost_of

aten = torch.ops.aten

WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""Tensors whose operations come by a second time, on the plain tensors inside."""

# What a fake tensor has no value to answer with, and what does in its place: norms of 0, no overflow, all equal.
_ANSWERS: dict[Any, Any] = {
    aten._local_scalar_dense.default: 0.0,
    aten.allclose.default: True,
    aten.equal.default: True,
    aten.is_nonzero.default: False,
}


@dataclass(eq=False)
class Block:
    """One storage. size: bytes now. hint: a category known before the end (plan/memory.py)."""

    size: int
    phase: str
    hint: str | None = None
    collective: bool = False
    ref: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Event:
    """`block` changed by `delta` bytes while the program was in `phase`, at `place`."""

    block: Block
    delta: int
    phase: str
    place: str


class Trace(TorchDispatchMode):
    """Watches what runs inside it. phase: what the program says it is doing; place: where in it.

    vocabulary: last dimensions that make a matrix of a forward pass logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = self.place = "build"
        self.events: list[Event] = []
        self.operations: list[Operation] = []
        self._blocks: dict[int, Block] = {}
        self._paused = 0
        self._undo: list[Callable[[], None]] = []
        self._counting = True
        self.vocabulary: frozenset[int] = frozenset()

    @property
    def bytes(self) -> int:
        """Held now."""
        return sum(block.size for block in self._blocks.values())

    def enter(self, phase: str, place: str | None = None) -> None:
        """Say what runs from here on."""
        self.phase, self.place = phase, place or phase

    def restart(self) -> None:
        """Forget what was done; what is held becomes the start."""
        self.events = [Event(block, block.size, "start", "start") for block in self._blocks.values()]
        self.operations = []

    def mark(self, tensor: torch.Tensor, hint: str) -> None:
        """Say what a tensor's storage is for. The last word counts."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        block = self._blocks.get(_key(local))
        if block is not None:
            block.hint = hint

    @contextmanager
    def counted_as(self, operation: Operation | None) -> Iterator[None]:
        """Take what runs inside for `operation` (None: for nothing), whatever it consists of."""
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before
        if operation is not None and self._counting:
            self.operations.append(operation)

    def __enter__(self) -> Trace:
        self._watch_resizes()
        self._leave_out_sharding_rules()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._undo:
            self._undo.pop()()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; note what it made and what it cost."""
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(issubclass(t, WRAPPERS) for t in types):
            return NotImplemented  # its own operations on plain tensors come by in a moment
        fake = any(issubclass(t, torch._subclasses.FakeTensor) for t in types)
        if fake and func in _ANSWERS:
            return _ANSWERS[func]
        out = func(*args, **(kwargs or {}))
        if self._paused or func.is_view:
            return out
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        new = [block for x in made if (block := self._see(x)) is not None]
        operation = cost_of(func, args, out, inputs, made, self.phase)
        if operation is None:
            return out
        if operation.collective is not None:
            for x in inputs:
                self._see(x).collective = True  # type: ignore[union-attr]
        elif func is aten._to_copy.default and new and made[0].dtype.itemsize == 2:
            source = self._blocks.get(_key(inputs[0]))
            if source is not None and source.hint == "master_weights":
                new[0].hint = "parameters"
        if self._counting:
            self.operations.append(operation)
        return out

    def _see(self, x: torch.Tensor) -> Block | None:
        """The block of a tensor, which may be new."""
        if type(x) is DTensor or x.device.type == "meta" or x.layout is not torch.strided:
            return None
        storage = x.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = Block(storage.nbytes(), self.phase)
            if x.ndim == 2 and x.shape[1] in self.vocabulary and self.phase.startswith("forward"):
                block.hint = "logits_and_loss"
            block.ref = weakref.ref(storage, lambda _: self._died(key))
            self._blocks[key] = block
            self.events.append(Event(block, block.size, self.phase, self.place))
        return block

    def _died(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.events.append(Event(block, -block.size, self.phase, self.place))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        block = self._blocks.get(storage._cdata)
        if block is None or self._paused:
            return
        delta = storage.nbytes() - block.size
        block.size += delta
        # FSDP2 keeps the tensors of a gathered layer and gives them memory only while it is gathered.
        block.hint = "gathered_parameters"
        self.events.append(Event(block, delta, self.phase, self.place))

    def _watch_resizes(self) -> None:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = original(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._undo.append(lambda: setattr(torch.UntypedStorage, "resize_", original))

    def _leave_out_sharding_rules(self) -> None:
        """DTensor runs each new operation once on fake whole tensors to learn its shape: nothing a rank holds."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        name = "_propagate_tensor_meta_non_cached"
        original = getattr(ShardingPropagator, name)

        def propagate(propagator: Any, schema: Any) -> Any:
            self._paused += 1
            try:
                return original(propagator, schema)
            finally:
                self._paused -= 1

        setattr(ShardingPropagator, name, propagate)
        self._undo.append(lambda: setattr(ShardingPropagator, name, original))


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
