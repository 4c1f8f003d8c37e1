"""What a rank runs for the fused operators: a tiny model with and without their patch, on the same weights."""

from __future__ import annotations

from typing import Any


def fused_equals_plain(ranks: Any, device_type: str) -> dict[str, float]:
    """Largest differences of the fused model's loss and of every gradient, relative to the plain one's largest number.

    ranks: this process's number among those on the machine, `ranks.rank`, is its device's.
    """
    import torch

    from lctrain.config.model import AttentionKernel
    from lctrain.models.causal_lm import build_meta
    from lctrain.models.materialize import init_random, materialize_empty
    from lctrain.models.npu_fused import fuse
    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.select import select_kernel
    from lctrain.runtime.device import Accelerator
    from tests.unit.models.tiny_models import config_of

    device = Accelerator(device_type, ranks.rank)
    device.activate()
    model = build_meta(config_of("llama"))
    materialize_empty(model, device.torch_device)
    init_random(model, seed=0)
    kernel = select_kernel(AttentionKernel.auto, device_type=device_type, dtype=torch.float32)
    model.route_attention(lambda *tensors, **how: attend_batch(kernel, *tensors, **how))
    plain = _step(model, device.torch_device)
    patch = fuse(model)
    try:
        fused = _step(model, device.torch_device)
    finally:
        patch.undo()
    return {name: float((fused[name] - x).abs().max() / x.abs().max()) for name, x in plain.items()}


def _step(model: Any, device: Any) -> dict[str, Any]:
    """The loss and every gradient, on the CPU, of two rows with three documents."""
    import torch

    from lctrain.ops.attention.documents import Documents

    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(10), torch.arange(14), torch.arange(24)]).view(2, 24).to(device)
    model.zero_grad()
    loss = model(ids, positions, ids.roll(-1, dims=1), Documents((0, 10, 24, 48)))
    loss.backward()
    grads = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach().cpu(), **grads}
