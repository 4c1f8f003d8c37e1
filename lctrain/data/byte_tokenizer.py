"""The tokenizer that needs no files: one token a byte of UTF-8."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lctrain.data.text_tokenizer import TextTokenizer

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
START, END = "<|im_start|>", "<|im_end|>"

# The marks of a turn are spelled in plain bytes, so that no text of a document can be taken for one token of them.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + START + "' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '" + END + "\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '" + END + "\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + START + "assistant\\n' }}{% endif %}"
)


class ByteTokenizer(TextTokenizer):
    """Ids 0..255 are the bytes of UTF-8; 256, 257 and 258 are bos, eos and pad."""

    def __init__(self) -> None:
        self.name = "byte"
        self.size = 259
        self.bos_id, self.eos_id, self.pad_id = 256, 257, 258
        self.fingerprint = hashlib.blake2b(f"byte:{CHAT_TEMPLATE}".encode(), digest_size=16).hexdigest()

    def tokens(self, text: str) -> np.ndarray:
        """The bytes of `text`, int32."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_messages(self, messages: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Each turn as `<|im_start|>role`, the content, `<|im_end|>`; see TextTokenizer."""
        ids, mask = [], []
        for message in messages:
            head = self.tokens(f"{START}{message['role']}\n")
            body = self.tokens(f"{message['content']}{END}\n")
            ids += [head, body]
            mask += [np.zeros(len(head), bool), np.full(len(body), message["role"] == "assistant")]
        return np.concatenate(ids), np.concatenate(mask)

    def save(self, folder: str | Path) -> None:
        """Write an equivalent PreTrainedTokenizerFast; see TextTokenizer."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_byte_level(),
            bos_token=BOS,
            eos_token=EOS,
            pad_token=PAD,
            # Text that happens to spell <|eos|> stays bytes, as it does here.
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(str(folder))


def _byte_level() -> Any:
    """A `tokenizers.Tokenizer` without merges in which the id of a byte is its value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet (Radford et al. 2019, GPT-2's encoder): printable Latin-1 stands for
    # itself, the other bytes, in order, for the characters from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
