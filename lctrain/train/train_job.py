"""The train verb on one rank: build the parts, continue a checkpoint if asked, run the trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lctrain.data.order import SampleOrder
from lctrain.data.prepared import PreparedData
from lctrain.errors import EXIT_OK, EXIT_PREEMPTED
from lctrain.models.signature import signature
from lctrain.optim.schedule import lr_factor
from lctrain.runtime.mesh import Mesh
from lctrain.train.callbacks.base import Callback
from lctrain.train.callbacks.build import build_callbacks
from lctrain.train.checkpoint import Identity, TrainState, find, read_state, save_checkpoint
from lctrain.train.evaluate import evaluate
from lctrain.train.language import Language, build_language
from lctrain.train.run_dir import RunDir, check_free, default_run_dir
from lctrain.train.session import Session, versions
from lctrain.train.trainer import Limits, Trainer


def rank_main(session: Session) -> int:
    """Train; returns the exit code of this rank."""
    config = session.config
    run_dir = RunDir(Path(session.share("run_dir", partial(_choose_run_dir, session))))
    data = session.prepare(("train", "eval"))
    train_data = data["train"]
    assert train_data is not None
    order, limits = _plan(session, train_data)
    identity = Identity(
        signature(session.read_model(), config.model.lora), order.global_batch_size, config.seed, train_data.fingerprint
    )
    checkpoint = session.share("checkpoint", partial(_find_checkpoint, session, run_dir, identity))
    if session.ranks.is_main:
        run_dir.create(config)
        session.log.attach(run_dir.log)
    session.describe()
    mesh = session.connect()
    language = build_language(session, mesh, init_weights=not checkpoint)
    state = _continue(session, language, run_dir, Path(checkpoint)) if checkpoint else TrainState()
    callbacks = build_callbacks(config.logging, run_dir, session.log) if session.ranks.is_main else []
    trainer = _trainer(session, language, run_dir, identity, data, order, limits, state, callbacks)
    status = "failed"
    try:
        status = trainer.fit()
    finally:
        for callback in callbacks:
            callback.close()
        if session.ranks.is_main:
            run_dir.write_summary(_summary(session, mesh, trainer, status))
    session.log(f"{status} at step {trainer.state.step}: loss {trainer.state.last_loss}")
    if session.ranks.is_main and session.ranks.launcher != "lctrain":
        print(f"run dir: {run_dir.path}", flush=True)
    return EXIT_OK if status == "completed" else EXIT_PREEMPTED


def _choose_run_dir(session: Session) -> str:
    config = session.config
    path = Path(config.run_dir) if config.run_dir else default_run_dir(config.recipe)
    check_free(path, config.checkpoint.resume)
    return str(path)


def _find_checkpoint(session: Session, run_dir: RunDir, identity: Identity) -> str:
    """The checkpoint to continue, or "". Raises CheckpointError for another model's, before anything is written."""
    resume = session.config.checkpoint.resume
    found = find(resume, run_dir.path, session.log) if resume else None
    if resume and found is None:
        session.log(f"checkpoint.resume={resume}: no checkpoint in {run_dir.path} yet; starting from the beginning")
    if found is not None:
        identity.check(read_state(found)[1], found, session.log)
    return str(found or "")


def _plan(session: Session, data: PreparedData) -> tuple[SampleOrder, Limits]:
    """Steps from epochs and max_steps, by one function, and said."""
    config = session.config
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)
    total = config.train.max_steps
    if config.train.max_epochs is not None:
        by_epochs = order.steps_for(config.train.max_epochs)
        total = by_epochs if total is None else min(total, by_epochs)
        limit = order.samples_in(config.train.max_epochs)
        order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=order.global_batch_size, limit=limit)
    assert total is not None
    per_epoch = len(data) / order.global_batch_size
    session.log(f"steps: {total:,} of {per_epoch:,.2f} an epoch ({len(data):,} sequences)")
    return order, Limits(total, config.train.max_skipped_steps, per_epoch)


def _continue(session: Session, language: Language, run_dir: RunDir, folder: Path) -> TrainState:
    """Weights, optimizer and state of a checkpoint."""
    state, _ = read_state(folder)
    language.engine.load(folder, optimizer=True)
    language.engine.load_scale_state(state.loss_scale)
    if session.ranks.is_main:
        run_dir.drop_metrics_after(state.step)
    session.log(f"continued from {folder}: step {state.step}")
    return state


def _trainer(
    session: Session,
    language: Language,
    run_dir: RunDir,
    identity: Identity,
    data: dict[str, PreparedData | None],
    order: SampleOrder,
    limits: Limits,
    state: TrainState,
    callbacks: list[Callback],
) -> Trainer:
    config, mesh, engine = session.config, language.mesh, language.engine
    train_data, eval_data = data["train"], data["eval"]
    assert train_data is not None

    def save(current: TrainState) -> None:
        save_checkpoint(
            run_dir.checkpoints,
            current,
            identity,
            write_tensors=engine.save,
            barrier=mesh.barrier,
            is_main=session.ranks.is_main,
            keep=config.checkpoint.save_total_limit,
        )

    return Trainer(
        engine=engine,
        objective=language.objective,
        batches=language.loader(train_data, order),
        mesh=mesh,
        limits=limits,
        lr_at=lambda step: config.optim.lr * lr_factor(config.schedule, step, limits.total_steps),
        save=save,
        evaluate=None
        if eval_data is None
        else lambda: evaluate(engine, language.objective, language.eval_batches(eval_data), mesh),
        stop=session.stop,
        seed=config.seed,
        save_steps=config.checkpoint.save_steps,
        eval_steps=config.eval.every_steps,
        save_at_end=config.checkpoint.save_at_end,
        callbacks=callbacks,
        state=state,
        first_step_done=language.check_attention_ran,
    )


def _summary(session: Session, mesh: Mesh, trainer: Trainer, status: str) -> dict[str, Any]:
    state = trainer.state
    return {
        "status": status,
        "verb": "train",
        "recipe": session.config.recipe,
        "layout": session.config.parallel.kind,
        "world_size": mesh.sizes.world,
        "device": mesh.device.name,
        "steps": state.step,
        "first_loss": state.first_loss,
        "last_loss": state.last_loss,
        "throughput": {f"{trainer.objective.unit}_per_s": trainer.throughput},
        "peak_memory_bytes": mesh.device.peak_memory_bytes(),
        "metrics": trainer.metrics,
        "versions": versions(),
    }
