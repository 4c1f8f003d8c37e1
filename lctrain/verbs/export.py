"""`python -m lctrain export run_dir=DIR out=OUT`: a checkpoint as a Hugging Face folder, or a classifier's file."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lctrain.config.model import CausalLMConfig
from lctrain.config.root import Device, TrainConfig
from lctrain.errors import EXIT_OK, CheckpointError, ConfigError
from lctrain.runtime.ascend import import_torch

if TYPE_CHECKING:
    import torch

_DTYPES = ("fp32", "bf16", "fp16")
_WEIGHTS = ("model", "average")
_FIELDS = {
    "run_dir": "the run to export",
    "out": "the folder to write; it must not exist or be empty",
    "checkpoint": "a checkpoints/step-N folder; the last whole one when not given",
    "dtype": f"one of {', '.join(_DTYPES)}; fp32 when not given",
    "weights": f"one of {', '.join(_WEIGHTS)} (an image run's moving average); model when not given",
}


def run(command: Any) -> int:
    """Write safetensors and what belongs to them. Raises ConfigError, CheckpointError."""
    fields = _parse(command.overrides)
    run_dir, out = Path(fields["run_dir"]), Path(fields["out"])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} exists and is not empty; choose another folder")
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"run_dir={run_dir} has no config.yaml; give the directory of a run")
    import_torch(Device.cpu)
    folder = _checkpoint(run_dir, fields.get("checkpoint"))
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _export(run_dir, folder, aside, fields)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"exported {folder} to {out}")
    return EXIT_OK


def _parse(overrides: tuple[str, ...]) -> dict[str, str]:
    fields = dict(o.split("=", 1) for o in overrides)
    for key in fields:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{key} is not a field of export; {hint}its fields are "
                + "; ".join(f"{k}: {v}" for k, v in _FIELDS.items())
            )
    for key in ("run_dir", "out"):
        if key not in fields:
            raise ConfigError(f"{key} is not given; write python -m lctrain export run_dir=DIR out=OUT")
    for key, known in (("dtype", _DTYPES), ("weights", _WEIGHTS)):
        if fields.get(key, known[0]) not in known:
            raise ConfigError(f"{key}={fields[key]} is unknown; it is one of {', '.join(known)}")
    return fields


def _checkpoint(run_dir: Path, given: str | None) -> Path:
    from lctrain.train.checkpoint import find

    found = find(given or "auto", run_dir, print)
    if found is None:
        raise CheckpointError(
            f"run_dir={run_dir} holds no whole checkpoint; train with checkpoint.save_steps, or let the run end"
        )
    return found


def _export(run_dir: Path, folder: Path, out: Path, fields: dict[str, str]) -> None:
    import torch

    from lctrain.config.plain import load
    from lctrain.verbs.export_image import export_classifier

    config = load(run_dir / "config.yaml")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[fields.get("dtype", "fp32")]
    average = fields.get("weights") == "average"
    if not isinstance(config.model, CausalLMConfig):
        export_classifier(config, run_dir, folder, out, dtype, average=average)
        return
    if average:
        raise ConfigError(f"weights=average is for image runs, and {run_dir} is a language run; leave it out")
    _export_language(config, folder, out, dtype)


def _export_language(config: TrainConfig, folder: Path, out: Path, target: torch.dtype) -> None:
    """One process holds the model once, in the exported dtype, in host memory; optimizer state is not read."""
    import torch

    from lctrain.data.tokenizer import load_tokenizer
    from lctrain.engines.sharded_state import read
    from lctrain.models.build import build_model, set_first_weights
    from lctrain.models.check import read_config
    from lctrain.models.export import export_folder, hf_name
    from lctrain.models.lora import merged_tensors
    from lctrain.models.materialize import materialize_empty
    from lctrain.runtime.seed import weights_seed

    hf_config = read_config(config.language_model, max_length=config.documents.max_length)
    trust = config.language_model.trust_remote_code
    # Adapters are merged in fp32 and rounded once.
    adapted = config.language_model.lora.rank is not None
    model = build_model(config.language_model, hf_config, dtype=torch.float32 if adapted else target)
    materialize_empty(model, torch.device("cpu"))
    if adapted:
        set_first_weights(model, config.language_model, seed=weights_seed(config.seed))
    read(folder, model)
    tensors = ((hf_name(name), tensor) for name, tensor in merged_tensors(model).items())
    export_folder(hf_config, tensors, out=out, dtype=target, trust_remote_code=trust)
    load_tokenizer(config.documents.tokenizer, config.language_model.path, trust_remote_code=trust).save(out)
