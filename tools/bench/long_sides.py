"""The sides of max_length.py: one wide-attention Llama at batch 1, trained by four programs on one sequence a step.

lctrain and transformers' Trainer are those of sides.py; here are TRL's SFTTrainer and DeepSpeed's ALST pieces.
All recompute decoder layers, compute in fp32 and update with torch's fused AdamW.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sides import FITS, LR, Case, hugging_face_model

if TYPE_CHECKING:
    import torch
    from common import Watch

SLICE_BYTES = 64 * 2**20
"""fp32 logits of one shard of ALST's loss. Its users' 1 GiB would not fit the budget."""
_ENDLESS = 10**6
_SHORT = 256


@dataclass(frozen=True)
class LongCase(Case):
    """A model whose memory a token is large for its arithmetic, so that a search for its limit ends."""

    @property
    def architecture(self) -> dict[str, Any]:
        """One layer of 64 heads of 128 over 8 key/value heads, as Llama 3 70B has; the width is what is tiny."""
        return {
            **super().architecture,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 2**20,
        }

    def documents(self) -> Any:
        """[2, length] token ids of the whole vocabulary, int64."""
        return _tokens(self.vocabulary, 2 * self.length).reshape(2, self.length)


@dataclass(frozen=True)
class ShortFirst(LongCase):
    """One short step, which makes the optimizer's state, before one of the whole length: half of the time."""

    def documents(self) -> Any:
        """Two documents, the short one being the first that is asked for."""
        return _InTurn(_tokens(self.vocabulary, n) for n in (_SHORT, self.length))


class _InTurn(list[Any]):
    """Gives its items one after the other, whichever is asked for."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__(items)
        self._turns = itertools.cycle(range(len(self)))

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(next(self._turns))


def _tokens(vocabulary: int, count: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, vocabulary, count)


def fit_trl(case: Case, watch: Watch) -> None:
    """TRL's SFTTrainer with its default loss, which works in tiles and never builds whole logits."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Watched(TrainerCallback):
        """Passes the Trainer's hooks on."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_end()

    rows = case.documents().tolist()
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(sys.stdout):
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=_ENDLESS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            max_length=None,
            packing=False,
            gradient_checkpointing=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
        )
        SFTTrainer(
            hugging_face_model(case), arguments, train_dataset=dataset, processing_class=_tokenizer(),
            callbacks=[Watched()],
        ).train()  # fmt: skip


def _tokenizer() -> Any:
    """Something that can pad, which is all that is asked of it here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="<eos>")


def fit_alst(case: Case, watch: Watch) -> None:
    """A bare loop with DeepSpeed's TiledMLP and TiledFusedLogitsLoss and transformers' gradient checkpointing."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    model = hugging_face_model(case)
    model.gradient_checkpointing_enable()
    _tile_mlps(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    watch.begin()
    for document in itertools.cycle(case.documents()):
        loss = _alst_loss(model, torch.from_numpy(document)[None])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f} grad norm {norm.item():.3f}", file=sys.stderr)
        watch.step_end()


def _tile_mlps(model: torch.nn.Module) -> None:
    """Shards of `hidden_size` tokens, as TiledMLP's documentation proposes."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for layer in model.model.layers:
        layer.mlp.forward = partial(_tiled, TiledMLP.apply, layer.mlp)


def _tiled(apply: Any, mlp: Any, states: torch.Tensor) -> torch.Tensor:
    return apply(type(mlp).forward, mlp, states, math.ceil(states.shape[1] / states.shape[2]), list(mlp.parameters()))


def _alst_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    # Divided inside: the head's gradient is taken there, before any later division could reach it.
    def share(head: Any, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(states), labels, reduction="sum") / (ids.numel() - 1)

    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    shards = math.ceil(labels.numel() * model.config.vocab_size * 4 / SLICE_BYTES)
    head = model.lm_head
    return TiledFusedLogitsLoss.apply(share, head, states, labels, None, shards, [head.weight], "sum")


LONG_FITS = {"ours": FITS["ours"], "trainer": FITS["trainer"], "trl": fit_trl, "alst": fit_alst}
