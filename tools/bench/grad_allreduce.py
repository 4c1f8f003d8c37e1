"""Summing ResNet-50's gradients over two ranks: DDP's buckets against one all-reduce per tensor.

    python tools/bench/grad_allreduce.py

The model is ResNet-50's parameters under a loss whose backward pass costs next to nothing, so that what is measured is
the exchange: forward, backward and the sums. Ours is the engine as it trains (parallel=ddp, its bucket size), the peer
sums tensor after tensor when the backward pass is over. `compressed` is ours with parallel.compress=bf16. Two gloo
ranks of one thread each.
"""

from __future__ import annotations

from typing import Any

from common import finish, paired_ratio, typical
from two_ranks import RANKS, Call, Variants, measure_between_ranks

TARGET = 0.8
ROUNDS, REPEATS = 8, 3


def main() -> None:
    """Measure."""
    blocks = measure_between_ranks(variants, rounds=ROUNDS, repeats=REPEATS, warm=3)
    ratio = paired_ratio(blocks["buckets"], blocks["per tensor"])
    finish(
        {
            "name": "grad_allreduce",
            "ours": typical(blocks["buckets"]),
            "peer": typical(blocks["per tensor"]),
            "ratio": ratio,
            "target": TARGET,
            "ok": ratio <= TARGET,
            "unit": "s",
            "compressed": typical(blocks["compressed"]),
            "compressed_ratio": paired_ratio(blocks["compressed"], blocks["per tensor"]),
        }
    )


def variants() -> Variants:
    """On a rank: the three ways, each with parameters of its own."""
    import torch
    import torch.distributed as dist

    from lctrain.config.parallel import DdpConfig, GradientDtype

    plain = parameters_of_resnet50()
    one = torch.ones(1)

    def per_tensor() -> None:
        (plain(one) / RANKS).backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None

    found: dict[str, Call] = {"per tensor": per_tensor}
    for name, config in (("buckets", DdpConfig()), ("compressed", DdpConfig(compress=GradientDtype.bf16))):
        engine = engine_of(config)

        def buckets(engine: Any = engine) -> None:
            with engine.microstep(last=True):
                engine.backward(engine.model(one) / RANKS)
            engine.optimizer.zero_grad(set_to_none=True)

        found[name] = buckets
    return {name: (lambda: None, run) for name, run in found.items()}


def parameters_of_resnet50() -> Any:
    """A module with ResNet-50's parameters whose output is the sum of them all."""
    import torch
    from torch import nn

    from lctrain.config.model import ResNetConfig
    from lctrain.models.image_model import build_image_model

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_image_model(ResNetConfig(), classes=1000, channels=3, image_size=32, seed=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((p.view(-1)[:1] * x).sum() + 0 * p.sum() for p in self.model.parameters())  # type: ignore[return-value]

    return Sum()


def engine_of(config: Any) -> Any:
    """The native engine around those parameters."""
    import torch

    from lctrain.config.precision import Fp32Config
    from lctrain.config.root import Device
    from lctrain.config.sizes import layout_sizes
    from lctrain.engines.native import NativeEngine
    from lctrain.optim.loss_scale import LossScale
    from lctrain.runtime.device import choose
    from lctrain.runtime.mesh import Mesh

    module = parameters_of_resnet50()
    return NativeEngine(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        parallel=config,
        mesh=Mesh(layout_sizes(config, RANKS), choose(Device.cpu, 0, RANKS)),
        autocast_dtype=None,
        scale=LossScale(Fp32Config()),
        max_grad_norm=None,
    )


if __name__ == "__main__":
    main()
