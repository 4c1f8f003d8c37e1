"""What a language job checks and prepares before its ranks meet."""

from __future__ import annotations

from typing import Any, Literal, cast

import transformers

from lctrain.config.model import CausalLMConfig, ModelInit
from lctrain.data.prepare import open_prepared, prepare
from lctrain.data.prepared import PreparedData
from lctrain.data.tokenizer import check_fits, load_tokenizer
from lctrain.errors import DeviceError
from lctrain.models.build import build_model
from lctrain.models.causal_lm import CausalLM, decoder_layers
from lctrain.models.check import read_config
from lctrain.models.pretrained_files import check_pretrained
from lctrain.models.signature import signature
from lctrain.ops.attention.select import select_kernel
from lctrain.train.memory_check import ModelCounts
from lctrain.train.session import Session

SplitName = Literal["train", "eval"]


class LanguageInput:
    """Documents, tokenizer and the causal LM of a session."""

    samples = "sequences"
    keeps_last = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._model, self._data = session.config.language_model, session.config.documents
        # What transformers warns about is either refused here by name or chosen on purpose.
        transformers.logging.set_verbosity_error()

    def check(self) -> None:
        """Everything that can be refused without weights, data or other ranks."""
        session, model = self._session, self._model
        hf_config = read_model(session)
        tokenizer = load_tokenizer(self._data.tokenizer, model.path, trust_remote_code=model.trust_remote_code)
        check_fits(tokenizer, hf_config.vocab_size)
        check_fused(model, session.device.type)
        select_kernel(model.attention, device_type=session.device.type, dtype=session.compute_dtype)
        if model.init is ModelInit.pretrained:
            assert model.path is not None
            check_pretrained(model.path)
        session.check_memory(counts_of(build_meta(session, hf_config)))

    def prepare(self, split: str) -> PreparedData | None:
        """Tokenise."""
        return prepare(
            self._data,
            model_path=self._model.path,
            vocab_size=read_model(self._session).vocab_size,
            split=cast(SplitName, split),
            trust_remote_code=self._model.trust_remote_code,
            report=self._session.log,
        )

    def open(self, key: str, split: str) -> PreparedData:
        """Map what the node's first rank tokenised."""
        return open_prepared(
            self._data,
            model_path=self._model.path,
            key=key,
            split=cast(SplitName, split),
            trust_remote_code=self._model.trust_remote_code,
        )

    def signature(self, data: object) -> dict[str, Any]:
        """The architecture and its adapters."""
        return signature(read_model(self._session), self._model.lora)

    @property
    def size(self) -> str:
        """What a step consists of."""
        return f"sequences of {self._data.max_length:,} tokens"

    @property
    def notes(self) -> list[str]:
        """Further lines for the log."""
        return []


def check_fused(model: CausalLMConfig, device_type: str) -> None:
    """Raise DeviceError when Ascend's fused operators are asked for on another device."""
    if model.npu_fused and device_type != "npu":
        raise DeviceError(
            f"model.npu_fused=true but the device is {device_type}, which has none of Ascend's fused operators; set "
            "model.npu_fused=false or device=npu"
        )


def read_model(session: Session) -> Any:
    """The transformers config the job builds, checked. Raises ConfigError or ModelError."""
    return read_config(session.config.language_model, max_length=session.config.documents.max_length)


def counts_of(model: CausalLM) -> ModelCounts:
    """What memory arithmetic asks of a whole model."""
    return ModelCounts(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layers=len(decoder_layers(model)),
        width=model.model.config.get_text_config().hidden_size,
    )


def build_meta(session: Session, hf_config: Any) -> CausalLM:
    """The model on meta. Raises ModelError when its own code refuses the configuration."""
    config = session.config
    return build_model(config.language_model, hf_config, loss_chunk_mb=config.memory.loss_chunk_mb)
