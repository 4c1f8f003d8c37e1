"""A tokenizer folder that transformers loads."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from lctrain.data.records import BadRecord
from lctrain.data.text_tokenizer import TextTokenizer
from lctrain.errors import DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether `folder` holds a vocabulary, or names the code of a tokenizer that needs none.

    A check of our own: without one transformers may build a class's empty default and say nothing.
    """
    root = Path(folder)
    if any(any(root.glob(pattern)) for pattern in _VOCABULARIES):
        return True
    config = root / "tokenizer_config.json"
    return config.is_file() and "auto_map" in json.loads(config.read_text(encoding="utf-8"))


class HFTokenizer(TextTokenizer):
    """transformers' AutoTokenizer of a local folder. Raises DataError where it does not load."""

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self.name = str(folder)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # each library behind a tokenizer has errors of its own
            raise DataError(
                f"the tokenizer in {folder} does not load ({type(error).__name__}: {error}); "
                "give data.tokenizer a folder that transformers' AutoTokenizer reads, or `byte`"
            ) from error
        vocabulary = self._tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        self.bos_id, self.eos_id = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        self.pad_id = next((i for i in (self._tokenizer.pad_token_id, self.eos_id) if i is not None), 0)
        self.fingerprint = self._hash(vocabulary)

    def tokens(self, text: str) -> np.ndarray:
        """The int32 ids of `text` alone."""
        # verbose=False: a document longer than model_max_length is what the framework is for.
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)

    def encode_messages(self, messages: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """See TextTokenizer. Raises BadRecord and DataError."""
        if self._marks_generation():
            encoded = self._render(messages, return_assistant_tokens_mask=True)
            return np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["assistant_masks"], bool)
        ids = np.asarray(self._render(messages)["input_ids"], np.int32)
        mask = np.zeros(len(ids), bool)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                if number == 0:
                    raise BadRecord(f"the assistant speaks first, which {self.name}'s chat template cannot open")
                start = self._prefix(ids, messages[:number], add_generation_prompt=True)
                mask[start : self._prefix(ids, messages[: number + 1])] = True
        return ids, mask

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer; see TextTokenizer."""
        self._tokenizer.save_pretrained(str(folder))

    def _marks_generation(self) -> bool:
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                f"the tokenizer {self.name} has no chat template, which `messages` need; "
                "add a chat_template.jinja to its folder, or give records a text field"
            ) from error
        # The mask needs offsets from tokens to characters, which only the fast tokenizers keep.
        return self._tokenizer.is_fast and _GENERATION.search(template) is not None

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
            )
        except TemplateError as error:
            raise BadRecord(f"the chat template of {self.name} refuses it: {error}") from error

    def _prefix(self, ids: np.ndarray, messages: list[dict[str, Any]], **options: Any) -> int:
        """How many of `ids` the first messages take. Raises DataError unless `ids` starts with them."""
        part = np.asarray(self._render(messages, **options)["input_ids"], np.int32)
        if not np.array_equal(part, ids[: len(part)]):
            raise DataError(
                f"the chat template of the tokenizer {self.name} renders the first {len(messages)} messages of a "
                "conversation differently alone and within it, so the assistant's tokens cannot be told from it; "
                "mark them in the template with {% generation %} ... {% endgeneration %}"
            )
        return len(part)

    def _hash(self, vocabulary: dict[str, int]) -> str:
        tokenizer = self._tokenizer
        content = {
            "class": type(tokenizer).__name__,
            "backend": tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(vocabulary.items()),
            "special": [self.bos_id, self.eos_id, self.pad_id, bool(tokenizer.split_special_tokens)],
            "chat": tokenizer.chat_template,
        }
        encoded = json.dumps(content, sort_keys=True).encode()
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()
