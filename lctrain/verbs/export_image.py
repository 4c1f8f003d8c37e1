"""Export of an image run: weights with torchvision's names, and what a program needs to use them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lctrain.config.root import TrainConfig
from lctrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

WEIGHTS, DESCRIPTION = "model.safetensors", "classifier.json"


def export_classifier(
    config: TrainConfig, run_dir: Path, folder: Path, out: Path, dtype: torch.dtype, *, average: bool
) -> None:
    """Write model.safetensors and classifier.json (model, class names in the order of labels, preprocessing).

    average: the moving average instead of the weights. `model.path` reads the first back. Raises ConfigError when
    there is no average, CheckpointError when the checkpoint is another model's or the run does not name its classes.
    """
    from safetensors.torch import save_file

    from lctrain.engines.sharded_state import read, read_tensors
    from lctrain.models.image_model import build_image_model
    from lctrain.train.checkpoint import read_state
    from lctrain.train.run_dir import RunDir

    signature = read_state(folder)[1]["model"]
    images = config.images
    model = build_image_model(
        replace(config.image_model, path=None),
        classes=signature["classes"],
        channels=signature["channels"],
        image_size=images.image_size,
        seed=0,
    )
    if average:
        if config.classification.ema_decay is None:
            raise ConfigError(f"weights=average but {run_dir} keeps none; train with classification.ema_decay=0.9999")
        read_tensors(folder, {f"ema.{name}": tensor for name, tensor in model.state_dict().items()})
    else:
        read(folder, model)
    names = RunDir(run_dir).read_classes()
    if len(names) > signature["classes"]:
        raise CheckpointError(
            f"{run_dir} names {len(names)} classes but {folder} has {signature['classes']}; give that checkpoint's run"
        )
    out.mkdir(parents=True)
    tensors = {n: t.detach().to(dtype if t.is_floating_point() else t.dtype) for n, t in model.state_dict().items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, str(out / WEIGHTS), metadata={"format": "pt"})
    description = {
        "model": signature,
        "classes": names,
        "image_size": images.image_size,
        "eval_crop": images.eval_crop,
        "mean": images.mean,
        "std": images.std,
    }
    (out / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
