"""Step time of the whole trainer, against a bare PyTorch loop and against transformers' Trainer.

    python tools/bench/overhead.py

One process and one thread a side, fp32, a tiny Llama, AdamW (fused), clipping, constant learning rate, and
in every step 2 x 1,024 tokens of real text. Every row is one document, so that plain causal attention
is right for all three and no side pays for a packing mask. Ours is `Trainer.fit` with everything a run has
(loader, objective, engine, metrics.jsonl, console lines, TensorBoard); nothing is recomputed on any side.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Pacer, Side, finish, paired_ratio, take_turns, typical

TARGET, TRAINER_TARGET = 1.05, 0.95
ROWS, LENGTH = 2, 1024
STEPS, ROUNDS = 12, 15
LR = 1e-3
ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Compare, or be one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=SIDES)
    side = parser.parse_args().side
    if side:
        SIDES[side]()
        return
    blocks = take_turns([Side(__file__, name) for name in SIDES], ROUNDS)
    ratio = paired_ratio(blocks["ours"], blocks["bare"])
    trainer_ratio = paired_ratio(blocks["ours"], blocks["trainer"])
    finish(
        "overhead",
        ours=typical(blocks["ours"]),
        peer=typical(blocks["bare"]),
        ratio=ratio,
        target=TARGET,
        ok=ratio <= TARGET and trainer_ratio <= TRAINER_TARGET,
        unit="s a step",
        trainer=typical(blocks["trainer"]),
        trainer_ratio=trainer_ratio,
        trainer_target=TRAINER_TARGET,
    )


def rows() -> Any:
    """[rows, LENGTH] bytes of the standard library's sources as token ids, int64."""
    import numpy as np

    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    count = min(len(text) // LENGTH, 1024)
    return np.frombuffer(text, np.uint8)[: count * LENGTH].reshape(count, LENGTH).astype(np.int64)


def ours() -> None:
    """`Trainer.fit` with the parts the train verb gives it."""
    import torch.distributed as dist

    from lctrain.config.compose import compose_config
    from lctrain.data.order import SampleOrder
    from lctrain.data.pieces import piece_of
    from lctrain.runtime.process import Ranks
    from lctrain.train.callbacks.base import Callback
    from lctrain.train.callbacks.build import build_callbacks
    from lctrain.train.language import build_language
    from lctrain.train.run_dir import RunDir
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag
    from lctrain.train.trainer import Limits, Trainer

    class Documents:
        """What the loader needs of prepared data."""

        pad_id = 0

        def __init__(self) -> None:
            self._rows = rows()

        def __len__(self) -> int:
            return len(self._rows)

        def sample(self, index: int) -> list[Any]:
            """One document of LENGTH tokens."""
            return [piece_of(self._rows[index])]

    class Turns(Callback):
        """Ends each step's time."""

        def start(self, *_: Any) -> None:
            self._pacer = Pacer(STEPS)

        def step_end(self, *_: Any) -> None:
            self._pacer()

    config = compose_config(
        [
            "recipe=llama_tiny_32k",
            "parallel=single",
            "memory=none",
            f"data.max_length={LENGTH}",
            f"train.global_batch_size={ROWS}",
            f"train.micro_batch_size={ROWS}",
            f"optim.lr={LR}",
        ]
    )
    config.model.architecture = ARCHITECTURE
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        session = Session(config, Ranks(), dist.HashStore(), StopFlag())
        language = build_language(session, session.connect(), init_weights=True)
        run_dir = RunDir(Path(folder))
        run_dir.create(config)
        session.log.attach(run_dir.log)
        data = Documents()
        order = SampleOrder(size=len(data), seed=0, global_batch_size=ROWS)
        Trainer(
            engine=language.engine,
            objective=language.objective,
            batches=language.loader(data, order),
            mesh=language.mesh,
            limits=Limits(10**6, 20, len(data) / ROWS),
            lr_at=lambda step: LR,
            save=lambda state: None,
            evaluate=None,
            stop=session.stop,
            seed=0,
            callbacks=[*build_callbacks(config.logging, run_dir, session.log), Turns()],
            first_step_done=language.check_attention_ran,
        ).fit()


def hugging_face_model() -> Any:
    """The same model as transformers builds it, with torch's attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = dict(ARCHITECTURE)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def bare() -> None:
    """The loop a person writes by hand."""
    import torch
    from torch.nn import functional as F

    def batches() -> Iterator[torch.Tensor]:
        data = torch.from_numpy(rows())
        while True:
            for index in torch.randperm(len(data)).split(ROWS):
                yield data[index]

    torch.manual_seed(0)
    model = hugging_face_model().train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    end_of_step = Pacer(STEPS)
    for step, ids in enumerate(batches()):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.3f}", file=sys.stderr)
        end_of_step()


def trainer() -> None:
    """transformers' Trainer on the same rows."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        """Ends each step's time."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._pacer = Pacer(STEPS)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._pacer()

    dataset = [{"input_ids": row, "labels": row} for row in torch.from_numpy(rows())]
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            max_steps=10**6,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(hugging_face_model(), arguments, train_dataset=dataset, callbacks=[Turns()]).train()


SIDES = {"ours": ours, "bare": bare, "trainer": trainer}

if __name__ == "__main__":
    main()
