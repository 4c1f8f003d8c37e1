"""Peak memory of tiled MLP and of activation offload at 32,768 tokens, each against the same model without it.

    python tools/bench/memory_options.py

Counted are bytes of live tensor storages, seen by a dispatch mode, over one forward and backward of a decoder
(no loss, no optimizer: neither option touches them), beyond the weights. A machine without an accelerator has one
memory, so for offload the host copies are told apart and left out: what is counted is what a device would hold.
Each option gets the shape it is for: tiled MLP few layers whose MLPs are 8 times their width, so that the MLP is
where memory peaks; offload 24 layers, so that what is kept between layers is. Takes about two minutes.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from common import finish

LENGTH, DOCUMENT = 32768, 1024
TILED_TARGET, OFFLOAD_TARGET = 0.6, 0.7
ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
}


def main() -> None:
    """Measure full recompute alone, with tiles, and with offload."""
    import torch

    torch.set_num_threads(2)
    wide, deep = {"layers": 4, "intermediate": 512}, {"layers": 24, "intermediate": 128}
    full, tiled = _peak("full", **wide), _peak("full", tiles=8, **wide)
    full_deep, offload = _peak("full", **deep), _peak("offload", **deep)
    finish(
        {
            "name": "memory_options",
            "ours": tiled,
            "peer": full,
            "ratio": tiled / full,
            "target": TILED_TARGET,
            "ok": tiled / full <= TILED_TARGET and offload / full_deep <= OFFLOAD_TARGET,
            "unit": "MiB at the peak; tiled MLP (8 tiles) over memory=full",
            "offload": offload,
            "offload_peer": full_deep,
            "offload_ratio": offload / full_deep,
            "offload_target": OFFLOAD_TARGET,
        }
    )


def _peak(recompute: str, *, layers: int, intermediate: int, tiles: int | None = None) -> float:
    """MiB of live device tensors at the peak of one forward and backward, beyond the weights."""
    import torch

    from lctrain.config.memory import MemoryConfig, Recompute
    from lctrain.config.model import CausalLMConfig, ModelInit
    from lctrain.models.build import build_model, set_first_weights
    from lctrain.models.causal_lm import decoder_layers
    from lctrain.models.check import read_config
    from lctrain.models.materialize import materialize_empty
    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.sdpa import SdpaKernel
    from lctrain.parallel import offload
    from lctrain.parallel.recompute import apply_recompute

    shape = {"num_hidden_layers": layers, "intermediate_size": intermediate}
    config = CausalLMConfig(init=ModelInit.random, architecture={**ARCHITECTURE, **shape})
    model = build_model(config, read_config(config, max_length=LENGTH))
    model.route_attention(partial(attend_batch, SdpaKernel()))
    apply_recompute(decoder_layers(model), MemoryConfig(recompute=Recompute[recompute], tiled_mlp=tiles))
    materialize_empty(model, torch.device("cpu"))
    set_first_weights(model, config, seed=0)
    live = _live_bytes()
    moved = offload._Moved

    def host_copy(host: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        live.forget(host)
        return moved(host, *args, **kwargs)

    ids = torch.randint(0, 320, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH)[None] % DOCUMENT
    documents = Documents.from_lengths([DOCUMENT] * (LENGTH // DOCUMENT))
    decoder = model.model.get_decoder()
    offload._Moved = host_copy  # type: ignore[assignment,misc]
    try:
        with live:
            states = decoder(input_ids=ids, position_ids=positions, use_cache=False, documents=documents)
            states.last_hidden_state.sum().backward()
    finally:
        offload._Moved = moved  # type: ignore[misc]
    return live.peak / 2**20


def _live_bytes() -> Any:
    """A dispatch mode that counts the storages operations make while they live."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = 0
            self._sizes: dict[int, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                    self._add(x.untyped_storage())
            return out

        def _add(self, storage: Any) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key in self._sizes:
                return
            self._sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

        def _drop(self, key: int) -> None:
            self.now -= self._sizes.pop(key, 0)

        def forget(self, x: torch.Tensor) -> None:
            """Count x no longer: it is in another memory."""
            self._drop(x.untyped_storage()._cdata)

    return Live()


if __name__ == "__main__":
    main()
