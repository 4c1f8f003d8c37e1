"""The evaluate verb on one rank: a run's checkpoint, or a model folder, on its validation data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from lctrain.config.model import CausalLMConfig, ImageModelConfig
from lctrain.errors import EXIT_OK, CheckpointError, ConfigError
from lctrain.train.checkpoint import find, read_state
from lctrain.train.regime import build_job
from lctrain.train.run_dir import RunDir, default_run_dir, json_ready
from lctrain.train.session import Session, versions


def rank_main(session: Session) -> int:
    """Evaluate; returns the exit code of this rank."""
    run_dir = RunDir(Path(session.share("run_dir", partial(_choose_run_dir, session))))
    checkpoint = session.share("checkpoint", partial(_find_checkpoint, session, run_dir))
    data = session.prepare(("eval",))["eval"]
    if data is None:
        raise ConfigError("data.source holds no validation images; give data.eval_source=PATH")
    session.describe()
    mesh = session.connect()
    job = build_job(session, mesh, data, init_weights=not checkpoint)
    step = 0
    if checkpoint:
        state, record = read_state(Path(checkpoint))
        step = state.step
        _check_model(record["model"], session.input.signature(data), checkpoint)
        job.engine.load(Path(checkpoint), optimizer=False)
    session.log(f"evaluating {checkpoint or _first_weights(session) or 'random weights'}")
    metrics = job.evaluate(data, while_training=False)
    session.log("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    if session.ranks.is_main:
        _write(session, run_dir, checkpoint, step, metrics, mesh.sizes.world)
    return EXIT_OK


def _choose_run_dir(session: Session) -> str:
    config = session.config
    return str(Path(config.run_dir) if config.run_dir else default_run_dir(config.recipe))


def _first_weights(session: Session) -> str | None:
    """Where weights come from without a checkpoint."""
    model = session.config.model
    return model.path if isinstance(model, CausalLMConfig | ImageModelConfig) else None


def _find_checkpoint(session: Session, run_dir: RunDir) -> str:
    resume = session.config.checkpoint.resume
    if not resume:
        return ""
    found = find(resume, run_dir.path, session.log)
    if found is None:
        raise CheckpointError(
            f"run_dir={run_dir.path} holds no whole checkpoint to evaluate; train it first, or give "
            "checkpoint.resume=PATH"
        )
    return str(found)


def _check_model(saved: dict[str, object], mine: dict[str, object], folder: str) -> None:
    different = sorted(k for k in saved.keys() | mine.keys() if saved.get(k) != mine.get(k))
    if different:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model (they differ in {', '.join(different[:4])}); "
            "evaluate it with the configuration it was trained with"
        )


def _write(
    session: Session, run_dir: RunDir, checkpoint: str, step: int, metrics: dict[str, float], world: int
) -> None:
    """A run's own summary.json is left alone: its evaluations lie beside it."""
    summary = {
        "status": "completed",
        "verb": "evaluate",
        "recipe": session.config.recipe,
        "layout": session.config.parallel.kind,
        "world_size": world,
        "device": session.device.name,
        "checkpoint": checkpoint or None,
        "model": _first_weights(session),
        "metrics": metrics,
        "versions": versions(),
    }
    if checkpoint:
        path = run_dir.path / f"evaluate-step-{step}.json"
        path.write_text(json.dumps(json_ready(summary), indent=1) + "\n", encoding="utf-8")
        return
    run_dir.create(session.config)
    run_dir.write_summary(summary)
