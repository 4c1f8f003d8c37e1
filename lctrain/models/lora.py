"""LoRA adapters by the peft library, put into a model on meta before any layout cuts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lctrain.config.model import LoraConfig
from lctrain.errors import ModelError
from lctrain.ops.shards import full_shape, writable_part
from lctrain.runtime.seed import derive

if TYPE_CHECKING:
    from lctrain.models.causal_lm import CausalLM

ADAPTER = "default"
_BASE = ".base_layer."


def add_lora(model: CausalLM, layers: list[nn.Module], config: LoraConfig) -> None:
    """Put adapters on linear layers of `layers` and freeze everything else, in place.

    Raises ModelError for target names that match nothing.
    """
    import peft

    linear = {name.rsplit(".", 1)[-1] for layer in layers for name, m in layer.named_modules() if type(m) is nn.Linear}
    targets = config.target_modules or sorted(linear)
    unknown = sorted(set(targets) - linear)
    if unknown:
        raise ModelError(
            f"model.lora.target_modules={unknown[0]} matches no linear layer; this model has "
            f"{', '.join(sorted(linear))}"
        )
    # A pattern, so that an output layer of the same name outside the decoder's layers is left alone.
    inside = rf".*\.\d+\.(.*\.)?({'|'.join(targets)})"
    assert config.rank is not None
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=inside,
        lora_dropout=0.0,
    )
    peft.inject_adapter_in_model(adapters, model.model, adapter_name=ADAPTER, low_cpu_mem_usage=True)


def is_adapter(name: str) -> bool:
    """Whether a parameter name is an adapter's."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """A parameter's name in a model without adapters."""
    return name.replace(_BASE, ".")


@torch.no_grad()
def init_lora(model: CausalLM, *, seed: int) -> None:
    """A from a uniform of variance 1 / (3 width) (Kaiming, a = sqrt 5) and B zero: the model starts unchanged.

    Each tensor has its own stream, seeded by (seed, name), so no layout changes it.
    """
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        shape = full_shape(parameter)
        whole = torch.zeros(shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derive(seed, name))
            whole.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
        with writable_part(parameter) as (local, where):
            local.copy_(whole[where])


@torch.no_grad()
def merged_tensors(model: CausalLM) -> dict[str, torch.Tensor]:
    """The model's state dict with adapters added into the weights, under names without adapters. Not sharded."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
    return {base_name(n): t for n, t in model.state_dict().items() if not is_adapter(n)}
