"""Which tokenizer a configuration names."""

from __future__ import annotations

from pathlib import Path

from lctrain.data.byte_tokenizer import ByteTokenizer
from lctrain.data.hf_tokenizer import HFTokenizer, has_tokenizer
from lctrain.data.text_tokenizer import TextTokenizer
from lctrain.errors import DataError


def load_tokenizer(spec: str | None, model_path: str | None, *, trust_remote_code: bool = False) -> TextTokenizer:
    """`byte`, a local folder, or (spec None) the tokenizer beside the model. Raises DataError."""
    if spec == "byte":
        return ByteTokenizer()
    field, value = ("data.tokenizer", spec) if spec is not None else ("model.path", model_path)
    if value is None:
        raise DataError(
            "data.tokenizer=null takes the tokenizer of model.path, and that is not set either; "
            "set data.tokenizer=byte or a folder"
        )
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"{field}={value} must be a local folder, and there is none; set data.tokenizer=byte or a folder"
        )
    if not has_tokenizer(folder):
        raise DataError(
            f"{field}={value} holds no tokenizer; set data.tokenizer=byte or a folder with a tokenizer.json"
        )
    return HFTokenizer(folder, trust_remote_code=trust_remote_code)


def check_fits(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Raise DataError unless every id of `tokenizer` has a row in an embedding of `vocab_size`."""
    if tokenizer.size > vocab_size:
        raise DataError(
            f"a tokenizer that does not fit the model's vocabulary: {tokenizer.name} has ids up to "
            f"{tokenizer.size - 1} ({tokenizer.size} tokens), the model {vocab_size} embeddings; "
            f"set data.tokenizer to the model's own, or vocab_size to at least {tokenizer.size}"
        )
