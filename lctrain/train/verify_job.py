"""The verify verb on one rank: the layout against one rank in fp32, on the same batch.

Every rank computes its part of the layout; the main rank also computes the whole batch alone, with the
reference kernel and nothing sharded or recomputed. Compared are the loss, the gradient norm and every
gradient; then one token of one document is edited, and no other document's logits may change.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lctrain.config.precision import Fp32Config, PrecisionConfig
from lctrain.data.loader import batch_of
from lctrain.data.order import SampleOrder
from lctrain.data.prepared import PreparedData
from lctrain.errors import EXIT_NO, EXIT_OK
from lctrain.models.build import set_first_weights
from lctrain.models.causal_lm import decoder_layers
from lctrain.models.materialize import materialize_empty
from lctrain.ops.attention.interface import attend_batch
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.seed import weights_seed
from lctrain.train.isolation import isolation_error
from lctrain.train.language import build_language
from lctrain.train.language_input import build_meta, read_model
from lctrain.train.run_dir import RunDir, default_run_dir
from lctrain.train.session import Session, versions
from lctrain.train.step import forward_backward

ROWS_SHOWN = 6


@dataclass
class Reference:
    """What one rank gets: the mean loss, the gradient norm and each gradient, on the host."""

    loss: float = 0.0
    grad_norm: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One row of the table. precision: what the layout computed in. error must not pass tolerance."""

    precision: str
    name: str
    error: float
    tolerance: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """An error that is not a number is never within tolerance."""
        return self.error <= self.tolerance


def rank_main(session: Session) -> int:
    """Verify; returns the exit code of this rank."""
    config = session.config
    run_dir = Path(session.share("run_dir", lambda: config.run_dir or str(default_run_dir(f"{config.recipe}-verify"))))
    data = session.prepare(("train",))["train"]
    assert data is not None
    session.describe()
    mesh = session.connect()
    order = SampleOrder(size=len(data), seed=config.seed, global_batch_size=config.train.global_batch_size)
    reference = _reference(session, mesh, data, order) if session.ranks.is_main else Reference()
    mesh.barrier()
    checks = _layout(session, mesh, data, order, reference, Fp32Config(), config.verify.tolerance)
    if not isinstance(config.precision, Fp32Config):
        checks += _layout(session, mesh, data, order, reference, config.precision, config.verify.half_tolerance)
    failed = int(session.share("verdict", lambda: str(sum(not c.ok for c in checks))))
    if session.ranks.is_main:
        _report(session, mesh, run_dir, checks)
    # The store lives in the first rank, which must not end before the others have read the verdict.
    mesh.barrier()
    return EXIT_NO if failed else EXIT_OK


def _reference(session: Session, mesh: Mesh, data: PreparedData, order: SampleOrder) -> Reference:
    """The whole global batch on this rank alone."""
    model = build_meta(session, read_model(session))
    model.route_attention(partial(attend_batch, ReferenceKernel()))
    materialize_empty(model, mesh.device.torch_device)
    set_first_weights(model, session.config.language_model, seed=weights_seed(session.config.seed))
    batches = [batch_of(data, order.step_indices(0)[i : i + 1]) for i in range(order.global_batch_size)]
    count = max(1, sum(b.count for b in batches))
    result = Reference()
    for batch in batches:
        batch = batch.to(mesh.device.torch_device)
        loss = model(batch.input_ids, batch.position_ids, batch.labels, batch.documents) / count
        loss.backward()
        result.loss += float(loss.detach())
    result.gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    result.grad_norm = float(torch.nn.utils.get_total_norm(list(result.gradients.values())))
    return result


def _layout(
    session: Session,
    mesh: Mesh,
    data: PreparedData,
    order: SampleOrder,
    reference: Reference,
    precision: PrecisionConfig,
    tolerance: float,
) -> list[Check]:
    """The layout's own numbers in `precision`, compared; only the main rank's checks mean anything."""
    this = replace(session, config=replace(session.config, precision=precision))
    this.log = session.log
    language = build_language(this, mesh, init_weights=True)
    micro = language.loader(data, order).batches(0)
    (count,), _ = mesh.sum_over_data([sum(b.count for b in micro)])
    loss = forward_backward(language.engine, language.objective, mesh, micro, max(count, 1.0))
    calls, layers = language.router.calls, len(decoder_layers(language.model))
    checks = [
        Check(precision.kind, "attention calls", max(0.0, layers - calls), 0.0, f"{calls} calls in {layers} layers"),
        _compare(precision.kind, "loss", loss.mean, reference.loss, tolerance),
        _compare(precision.kind, "gradient norm", language.engine.grad_norm(), reference.grad_norm, tolerance),
    ]
    for name, grad in language.engine.gradients():
        if session.ranks.is_main:
            checks.append(_compare_gradient(precision.kind, name, grad, reference, tolerance))
    others, own = isolation_error(language, vocabulary=language.hf_config.vocab_size, length=_length(session, mesh))
    checks.append(Check(precision.kind, "isolation", others, 0.0, f"edited document's own logits moved by {own:.3g}"))
    checks.append(Check(precision.kind, "isolation, the edit shows", 0.0 if own > 0 else 1.0, 0.0))
    return checks


def _length(session: Session, mesh: Mesh) -> int:
    multiple = mesh.sizes.length_multiple
    return max(1, session.config.documents.max_length // multiple) * multiple


def _compare(precision: str, name: str, got: float, expected: float, tolerance: float) -> Check:
    error = abs(got - expected) / max(abs(expected), 1e-12)
    return Check(precision, name, error, tolerance, f"{got:.8g}, one rank {expected:.8g}")


def _compare_gradient(precision: str, name: str, grad: torch.Tensor, reference: Reference, tolerance: float) -> Check:
    expected = reference.gradients[name]
    scale = float(expected.norm()) or 1.0
    error = float((grad.detach().float().cpu() - expected).norm()) / scale
    return Check(precision, f"gradient of {name}", error, tolerance, f"norm {scale:.3g}")


def _report(session: Session, mesh: Mesh, path: Path, checks: list[Check]) -> None:
    """The table on the terminal, everything in verify.json."""
    run_dir = RunDir(path)
    run_dir.create(session.config)
    session.log.attach(run_dir.log)
    failed = [c for c in checks if not c.ok]
    shown = failed or sorted(checks, key=lambda c: -c.error / (c.tolerance or 1.0))[:ROWS_SHOWN]
    shown = [*(c for c in checks if not c.name.startswith("gradient of") and c not in shown), *shown[: 4 * ROWS_SHOWN]]
    width = max(len(c.name) for c in shown)
    for c in shown:
        mark = "ok  " if c.ok else "DIFF"
        session.log(
            f"{mark} {c.precision}  {c.name:<{width}}  error {c.error:.2e} (at most {c.tolerance:.0e})  {c.detail}"
        )
    verdict = "differs from" if failed else "equals"
    session.log(
        f"{session.config.parallel.kind} on {mesh.sizes.world} ranks {verdict} one rank: "
        f"{len(checks) - len(failed)} of {len(checks)} checks passed"
    )
    record: dict[str, Any] = {
        "ok": not failed,
        "layout": session.config.parallel.kind,
        "world_size": mesh.sizes.world,
        "sizes": asdict(mesh.sizes),
        "device": mesh.device.name,
        "checks": [{**asdict(c), "ok": c.ok} for c in checks],
        "versions": versions(),
    }
    (path / "verify.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    summary = {k: record[k] for k in ("layout", "world_size", "device", "versions")}
    run_dir.write_summary(
        {
            "status": "completed",
            "verb": "verify",
            "recipe": session.config.recipe,
            **summary,
            "metrics": {"checks": len(checks), "failed": len(failed)},
        }
    )
