"""The train verb on one rank: build the parts, continue a checkpoint if asked, run the trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lctrain.config.root import EvalConfig
from lctrain.data.order import SampleOrder
from lctrain.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError
from lctrain.optim.build import optimizer_signature
from lctrain.optim.schedule import describe_peak, lr_factor
from lctrain.runtime.mesh import Mesh
from lctrain.train.callbacks.base import Callback, close_all
from lctrain.train.callbacks.build import build_callbacks
from lctrain.train.checkpoint import Identity, TrainState, find, read_state, save_checkpoint
from lctrain.train.regime import Job, Split, build_job
from lctrain.train.run_dir import RunDir, check_free, default_run_dir
from lctrain.train.session import Session, versions
from lctrain.train.trainer import Limits, Trainer


def rank_main(session: Session) -> int:
    """Train; returns the exit code of this rank."""
    config = session.config
    run_dir = RunDir(Path(session.share("run_dir", partial(_choose_run_dir, session))))
    data = session.prepare(("train", "eval"))
    order, limits = _plan(session, data["train"])
    identity = Identity(
        model=session.input.signature(data["train"]),
        optimizer=optimizer_signature(config.optim),
        global_batch_size=order.global_batch_size,
        seed=config.seed,
        data=data["train"].fingerprint,
    )
    checkpoint = session.share("checkpoint", partial(_find_checkpoint, session, run_dir, identity))
    if session.ranks.is_main:
        run_dir.create(config)
        session.log.attach(run_dir.log)
    session.describe()
    session.log(describe_peak(config.optim, order.global_batch_size))
    mesh = session.connect()
    job = build_job(session, mesh, data["train"], init_weights=not checkpoint)
    state = _continue(session, job, Path(checkpoint)) if checkpoint else TrainState()
    if session.ranks.is_main:
        run_dir.drop_metrics_after(state.step)  # also what a run left that ended before its first checkpoint
    callbacks = build_callbacks(config, run_dir, session.log, ranks=session.ranks, mesh=mesh)
    if session.ranks.is_main:
        callbacks += job.callbacks(run_dir.path, data, order)
    trainer = _trainer(session, mesh, job, run_dir, identity, data, order, limits, state, callbacks)
    status, begun = "failed", state.step
    try:
        status = trainer.fit()
    finally:
        if session.ranks.is_main:
            epochs = (trainer.state.step - begun) / limits.steps_per_epoch
            run_dir.write_summary(_summary(session, mesh, trainer, status, job.data_report(epochs)))
        close_all(callbacks, status, session.log)
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


def _plan(session: Session, data: Split) -> tuple[SampleOrder, Limits]:
    """Steps from epochs and max_steps, by one function, and said."""
    config = session.config
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)
    total = config.train.max_steps
    if config.train.max_epochs is not None:
        limit = order.samples_in(config.train.max_epochs)
        keeps_last = session.input.keeps_last
        by_epochs = order.steps_for(config.train.max_epochs) if keeps_last else limit // order.global_batch_size
        if by_epochs == 0:
            raise ConfigError(
                f"train.global_batch_size={order.global_batch_size} is more than the {limit:,} {session.input.samples} "
                f"of train.max_epochs={config.train.max_epochs:g}; lower it, or train longer"
            )
        total = by_epochs if total is None else min(total, by_epochs)
        order = replace(order, limit=limit)
    assert total is not None
    per_epoch = len(data) / order.global_batch_size
    session.log(f"steps: {total:,} of {per_epoch:,.2f} an epoch ({len(data):,} {session.input.samples})")
    return order, Limits(total, config.train.max_skipped_steps, per_epoch)


def _continue(session: Session, job: Job, folder: Path) -> TrainState:
    """Weights, optimizer and state of a checkpoint."""
    state, _ = read_state(folder)
    job.engine.load(folder, optimizer=True)
    job.engine.load_scale_state(state.loss_scale)
    session.log(f"continued from {folder}: step {state.step}")
    return state


def _trainer(
    session: Session,
    mesh: Mesh,
    job: Job,
    run_dir: RunDir,
    identity: Identity,
    data: dict[str, Any],
    order: SampleOrder,
    limits: Limits,
    state: TrainState,
    callbacks: list[Callback],
) -> Trainer:
    config, engine, held_out = session.config, job.engine, data["eval"]
    peak = config.optim.peak_lr(order.global_batch_size)
    factor = partial(
        lr_factor, config.schedule, total_steps=limits.total_steps, steps_per_epoch=limits.steps_per_epoch, peak=peak
    )

    def save(current: TrainState) -> None:
        job.before_save()
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
        objective=job.objective,
        batches=job.loader(data["train"], order),
        mesh=mesh,
        limits=limits,
        lr_at=lambda step: peak * factor(step),
        save=save,
        evaluate=None if held_out is None else partial(job.evaluate, held_out, while_training=True),
        stop=session.stop,
        seed=config.seed,
        save_steps=config.checkpoint.save_steps,
        eval_due=partial(eval_due, config.eval, limits.steps_per_epoch),
        save_at_end=config.checkpoint.save_at_end,
        callbacks=callbacks,
        state=state,
        first_step_done=job.first_step_done,
        step_done=job.step_done,
    )


def eval_due(config: EvalConfig, steps_per_epoch: float, step: int) -> bool:
    """Whether to evaluate after `step` steps: on the first step that completes another every_epochs."""
    if config.every_steps:
        return step % config.every_steps == 0
    if not config.every_epochs:
        return False
    every = config.every_epochs * steps_per_epoch
    # A hair's breadth for epochs that are whole numbers of steps but not whole floats.
    return int((step + 1e-6) / every) > int((step - 1 + 1e-6) / every)


def _summary(session: Session, mesh: Mesh, trainer: Trainer, status: str, data: dict[str, Any]) -> dict[str, Any]:
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
        "data": data,
        "versions": versions(),
    }
