"""Image classifiers of a config, with the same first weights on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lctrain.config.model import ImageModelConfig, LeNetConfig, ResNetConfig
from lctrain.errors import ModelError
from lctrain.models.lenet import LeNet
from lctrain.models.resnet import ResNet


def build_image_model(
    config: ImageModelConfig, *, classes: int, channels: int, image_size: int, seed: int
) -> ResNet | LeNet:
    """The model on the CPU in fp32, with weights from `seed` alone or from config.path.

    Leaves torch's random state as it was. Raises ModelError for weights that do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        match config:
            case ResNetConfig():
                model: ResNet | LeNet = ResNet(config, classes=classes, channels=channels)
            case LeNetConfig():
                model = LeNet(classes=classes, channels=channels, image_size=image_size)
            case _:
                raise AssertionError(type(config))
    if config.path is not None:
        model.load_state_dict(_read_weights(model, Path(config.path).expanduser()), strict=False)
    return model


def check_weights(config: ImageModelConfig, *, classes: int, channels: int, image_size: int) -> None:
    """Raise ModelError when config.path cannot be read or does not fit the model; nothing is kept."""
    if config.path is not None:
        with torch.device("meta"):
            model = build_image_model(
                replace(config, path=None), classes=classes, channels=channels, image_size=image_size, seed=0
            )
        _read_weights(model, Path(config.path).expanduser())


def to_channels_last(model: nn.Module) -> None:
    """Weights of convolutions with channels innermost, in place."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _read_weights(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file with torchvision's names. Raises ModelError naming what is missing or misshapen."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.path={path} cannot be read ({error}); give a safetensors file") from error
    wanted = model.state_dict()
    # Files written before torch counted batches have no counters.
    missing = sorted(n for n in wanted.keys() - found.keys() if not n.endswith("num_batches_tracked"))
    extra = sorted(found.keys() - wanted.keys())
    wrong = [
        f"{n} is {list(found[n].shape)}, the model's {list(wanted[n].shape)}"
        for n in wanted.keys() & found.keys()
        if found[n].shape != wanted[n].shape
    ]
    if missing or extra or wrong:
        what = (
            [f"it has no {n}" for n in missing[:2]] + [f"the model has no {n}" for n in extra[:2]] + sorted(wrong)[:2]
        )
        raise ModelError(
            f"model.path={path} does not fit the model: {'; '.join(what)}; set model.depth, model.classes and "
            "model.channels to the file's, or leave model.path out"
        )
    return found


def weights_hash(model: nn.Module) -> str:
    """A hash over every parameter: ranks that disagree have different software or files."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().numpy().data)
    return digest.hexdigest()


def image_flops(model: nn.Module, *, channels: int, image_size: int) -> float:
    """FLOPs of one image's forward and backward pass: three times the forward's matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        training = model.training
        model.eval()
        model(torch.zeros(1, channels, image_size, image_size))
        model.train(training)
    return 3.0 * counter.get_total_flops()


def image_signature(config: ImageModelConfig, *, classes: int, channels: int, image_size: int) -> dict[str, Any]:
    """What makes two image models the same model, for checkpoints."""
    same: dict[str, Any] = {"kind": config.kind, "classes": classes, "channels": channels}
    match config:
        case ResNetConfig():
            return same | {
                "depth": config.depth,
                "width": config.width,
                "stem": config.stem.name if config.stem else None,
            }
        case LeNetConfig():
            return same | {"image_size": image_size}
    raise AssertionError(type(config))
