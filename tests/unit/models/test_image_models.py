"""Image classifiers: shapes and sizes that are known, first weights, files with torchvision's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lctrain.config.model import ImageModelConfig, LeNetConfig, ResNetConfig, Stem
from lctrain.errors import ModelError
from lctrain.models.image_model import build_image_model, image_flops, image_signature, to_channels_last, weights_hash
from lctrain.models.resnet import ResNet


def build(
    config: ImageModelConfig, *, classes: int = 10, channels: int = 1, size: int = 28, seed: int = 0
) -> nn.Module:
    """A model on the CPU."""
    return build_image_model(config, classes=classes, channels=channels, image_size=size, seed=seed)


# Parameters as published with torchvision's weights (1,000 classes, 3 channels).
@pytest.mark.parametrize(
    ("depth", "count"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_sizes(depth: int, count: int) -> None:
    with torch.device("meta"):
        model = ResNet(ResNetConfig(depth=depth), classes=1000, channels=3)
    assert sum(p.numel() for p in model.parameters()) == count


def test_names_are_torchvisions() -> None:
    names = set(build(ResNetConfig(depth=50, width=4), channels=3, size=32).state_dict())
    assert len(names) == 320
    assert {
        "conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight", "layer1.0.downsample.1.num_batches_tracked",
        "layer4.2.conv3.weight", "layer4.2.bn3.bias", "fc.weight", "fc.bias",
    } <= names  # fmt: skip
    assert set(build(ResNetConfig(depth=18)).state_dict()) >= {"layer2.0.downsample.0.weight", "layer4.1.bn2.weight"}


def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution() -> None:
    block = build(ResNetConfig(depth=50, width=4)).layer2[0]  # type: ignore[index, union-attr]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_stems() -> None:
    images = torch.zeros(2, 1, 64, 64)
    small = build(ResNetConfig(depth=18, width=4, stem=Stem.small))
    large = build(ResNetConfig(depth=18, width=4))
    assert small.bn1(small.conv1(images)).shape[-1] == 64  # type: ignore[operator]
    assert large.maxpool(large.bn1(large.conv1(images))).shape[-1] == 16  # type: ignore[operator]
    assert build(ResNetConfig(depth=8)).conv1.kernel_size == (3, 3)  # type: ignore[union-attr]
    assert len(build(ResNetConfig(depth=20)).stages) == 3  # type: ignore[arg-type]


def test_first_weights_are_the_seeds_alone() -> None:
    state = torch.get_rng_state()
    torch.manual_seed(5)
    one = build(ResNetConfig(depth=8), seed=3)
    torch.manual_seed(6)
    assert weights_hash(build(ResNetConfig(depth=8), seed=3)) == weights_hash(one)
    assert weights_hash(build(ResNetConfig(depth=8), seed=4)) != weights_hash(one)
    torch.set_rng_state(state)


def test_zero_gamma_and_a_narrow_last_layer() -> None:
    on = build(ResNetConfig(depth=8))
    off = build(ResNetConfig(depth=8, zero_init_last_gamma=False, fc_std=None))
    assert float(on.layer1[0].bn2.weight.detach().abs().max()) == 0.0  # type: ignore[index, union-attr]
    assert float(off.layer1[0].bn2.weight.detach().min()) == 1.0  # type: ignore[index, union-attr]
    assert on.fc.weight.std().item() == pytest.approx(0.01, rel=0.2)  # type: ignore[union-attr]
    assert off.fc.weight.std().item() > 0.05  # type: ignore[union-attr]


def test_lenet() -> None:
    model = build(LeNetConfig())
    assert sum(p.numel() for p in model.parameters()) == 61_706
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert build(LeNetConfig(), size=32)(torch.zeros(1, 1, 32, 32)).shape == (1, 10)


def test_a_file_fits_whatever_the_order_in_memory(tmp_path: Path) -> None:
    model = build(ResNetConfig(depth=8), seed=1)
    to_channels_last(model)
    assert model.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
    path = tmp_path / "weights.safetensors"
    save_file({n: t.contiguous() for n, t in model.state_dict().items() if "num_batches" not in n}, path)
    again = build(ResNetConfig(depth=8, path=str(path)), seed=2)
    assert weights_hash(again) == weights_hash(model)
    with pytest.raises(ModelError, match=r"fc\.weight is \[10, 64\], the model's \[7, 64\]"):
        build(ResNetConfig(depth=8, path=str(path)), classes=7)
    with pytest.raises(ModelError, match=r"it has no layer1\.1\."):
        build(ResNetConfig(depth=20, path=str(path)))
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be read"):
        build(ResNetConfig(depth=8, path=str(tmp_path / "bad.safetensors")))


def test_flops_by_hand() -> None:
    model = build(LeNetConfig())
    conv = 2 * (28 * 28 * 6 * 25 + 10 * 10 * 16 * 6 * 25)
    linear = 2 * (400 * 120 + 120 * 84 + 84 * 10)
    assert image_flops(model, channels=1, image_size=28) == 3 * (conv + linear)
    assert model.training


def test_signatures_tell_models_apart() -> None:
    sign = lambda config, classes=10: image_signature(config, classes=classes, channels=1, image_size=28)  # noqa: E731
    different = [
        sign(ResNetConfig(depth=8)),
        sign(ResNetConfig(depth=20)),
        sign(ResNetConfig(depth=8, width=32)),
        sign(ResNetConfig(depth=8, stem=Stem.imagenet)),
        sign(ResNetConfig(depth=8), 11),
        sign(LeNetConfig()),
    ]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert sign(ResNetConfig(depth=8)) == sign(ResNetConfig(depth=8, fc_std=None))
