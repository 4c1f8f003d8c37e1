"""One tiny Llama trained three ways: by lctrain, by a hand-written loop, by transformers' Trainer.

All take the same documents of the standard library's sources, fp32, AdamW (fused), a constant learning
rate and clipping at norm 1. Every row is one document, so plain causal attention is right for all three and
no side pays for a packing mask.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common import Watch

LR = 1e-3
_ENDLESS = 10**6


@dataclass(frozen=True)
class Case:
    """rows sequences of length tokens a step; recompute: keep only the inputs of decoder layers.

    overrides: more of lctrain's configuration.
    """

    vocabulary: int
    rows: int
    length: int
    recompute: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def architecture(self) -> dict[str, Any]:
        """The recipe llama_tiny_32k's, with this vocabulary."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        }

    def documents(self) -> Any:
        """[documents, length] token ids, int64: each byte of the text moved to its own place in the vocabulary."""
        import numpy as np

        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        count = len(text) // self.length
        ids = np.frombuffer(text, np.uint8)[: count * self.length].reshape(count, self.length).astype(np.int64)
        return ids * (self.vocabulary // 256)


class _Prepared:
    """What lctrain's loader needs of data."""

    pad_id = 0

    def __init__(self, case: Case) -> None:
        self._documents = case.documents()

    def __len__(self) -> int:
        return len(self._documents)

    def sample(self, index: int) -> list[Any]:
        """The one document of a sequence."""
        from lctrain.data.pieces import piece_of

        return [piece_of(self._documents[index])]


def fit_ours(case: Case, watch: Watch) -> None:
    """`Trainer.fit` with the parts the train verb gives it, and everything a run writes."""
    import torch.distributed as dist

    from lctrain.config.compose import compose_config
    from lctrain.data.order import SampleOrder
    from lctrain.runtime.process import Ranks
    from lctrain.train.callbacks.build import build_callbacks
    from lctrain.train.language import build_language
    from lctrain.train.run_dir import RunDir
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag
    from lctrain.train.trainer import Limits, Trainer

    overrides = {
        "recipe": "llama_tiny_32k",
        "parallel": "single",
        "memory": "full" if case.recompute else "none",
        "data.max_length": case.length,
        "train.global_batch_size": case.rows,
        "train.micro_batch_size": case.rows,
    }
    config = compose_config([*(f"{key}={value}" for key, value in overrides.items()), *case.overrides])
    config.model.architecture = case.architecture
    with tempfile.TemporaryDirectory() as folder:
        session = Session(config, Ranks(), dist.HashStore(), StopFlag())
        language = build_language(session, session.connect(), init_weights=True)
        run_dir = RunDir(Path(folder))
        run_dir.create(config)
        session.log.attach(run_dir.log)
        data = _Prepared(case)
        order = SampleOrder(size=len(data), seed=0, global_batch_size=case.rows)
        Trainer(
            engine=language.engine,
            objective=language.objective,
            batches=language.loader(data, order),
            mesh=language.mesh,
            limits=Limits(_ENDLESS, 20, len(data) / case.rows),
            lr_at=lambda step: LR,
            save=lambda state: None,
            evaluate=None,
            stop=session.stop,
            seed=0,
            callbacks=[*build_callbacks(config, run_dir, session.log, rank=0), _our_callback(watch)],
            first_step_done=language.first_step_done,
        ).fit()


def _our_callback(watch: Watch) -> Any:
    from lctrain.train.callbacks.base import Callback

    class Watched(Callback):
        """Passes the trainer's hooks on."""

        def start(self, *_: Any) -> None:
            watch.begin()

        def step_end(self, *_: Any) -> None:
            watch.step_end()

    return Watched()


def hugging_face_model(case: Case) -> Any:
    """The same model as transformers builds it, with torch's attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = case.architecture
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def fit_bare(case: Case, watch: Watch) -> None:
    """The loop a person writes by hand."""
    import torch
    from torch.nn import functional as F

    def batches() -> Iterator[torch.Tensor]:
        documents = torch.from_numpy(case.documents())
        while True:
            for indices in torch.randperm(len(documents)).split(case.rows):
                yield documents[indices]

    model = hugging_face_model(case)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    watch.begin()
    for step, ids in enumerate(batches()):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.3f}", file=sys.stderr)
        watch.step_end()


def fit_trainer(case: Case, watch: Watch) -> None:
    """transformers' Trainer on the same documents, with its own logging at its default (every 500 steps)."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watched(TrainerCallback):
        """Passes the Trainer's hooks on."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_end()

    dataset = [{"input_ids": row, "labels": row} for row in torch.from_numpy(case.documents())]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(sys.stdout):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.rows,
            max_steps=_ENDLESS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            gradient_checkpointing=case.recompute,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(hugging_face_model(case), arguments, train_dataset=dataset, callbacks=[Watched()]).train()


FITS = {"ours": fit_ours, "bare": fit_bare, "trainer": fit_trainer}
