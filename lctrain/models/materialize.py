"""From meta to memory: empty storage of this rank's part, and random weights that no layout changes."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from lctrain.errors import ModelError
from lctrain.models.causal_lm import CausalLM
from lctrain.models.lora import base_name, is_adapter
from lctrain.ops.shards import full_shape, writable_part


def materialize_empty(module: nn.Module, device: torch.device) -> None:
    """Give every meta parameter uninitialised storage on `device` and move the rest there, in place.

    Works on plain and FSDP2 modules; parameters that are one object in several places stay one object.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for (owner, name), *others in places.values():
        for other, other_name in others:
            other._parameters[other_name] = owner._parameters[name]


@torch.no_grad()
def init_random(model: CausalLM, *, seed: int) -> str:
    """Initialise a materialized model as its own code does, the same on every rank and layout.

    Whole tensors are made one module at a time on the CPU in fp32, from a stream seeded by (seed, module
    name), and this rank keeps its part; no rank holds the whole model and nothing is broadcast. Leaves
    torch's random state as it was. Returns a hash of the whole tensors: ranks that disagree have
    different software. Raises ModelError when the model's code leaves a parameter unset.
    """
    digest, seen = hashlib.sha256(), set()
    state = torch.get_rng_state()
    try:
        for path, module in model.model.named_modules():
            own = {k: p for k, p in module._parameters.items() if p is not None}
            if not own or is_adapter(path) or all(id(p) in seen for p in own.values()):
                continue
            path = canonical_name(path)
            for name, whole in _initialised(model, module, own, seed=seed, path=path).items():
                if id(own[name]) in seen:
                    continue
                seen.add(id(own[name]))
                if whole.isnan().any():
                    raise ModelError(
                        f"{type(model.model).__name__} does not initialise {path}.{name}; use model.init=pretrained"
                    )
                with writable_part(own[name]) as (local, where):
                    local.copy_(whole[where])
                digest.update(f"{path}.{name}{tuple(whole.shape)}".encode())
                digest.update(whole.numpy().data)
    finally:
        torch.set_rng_state(state)
    return digest.hexdigest()


def _initialised(
    model: CausalLM, module: nn.Module, own: dict[str, nn.Parameter], *, seed: int, path: str
) -> dict[str, torch.Tensor]:
    """Whole tensors of one module's own parameters. NaN marks what the model's code did not set."""
    whole = {name: nn.Parameter(torch.full(full_shape(p), torch.nan), requires_grad=False) for name, p in own.items()}
    stream = int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1
    torch.default_generator.manual_seed(stream)
    module._parameters.update(whole)
    try:
        model.model._init_weights(module)
    finally:
        module._parameters.update(own)
    return {name: parameter.data for name, parameter in whole.items()}


def canonical_name(name: str) -> str:
    """A module or parameter name without what adapters, recompute and compile wrappers add to it."""
    return base_name(f"{name}.")[:-1].replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
