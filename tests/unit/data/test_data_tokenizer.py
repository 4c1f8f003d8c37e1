from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lctrain.data.byte_tokenizer import ByteTokenizer
from lctrain.data.records import BadRecord
from lctrain.data.tokenizer import check_fits, load_tokenizer
from lctrain.errors import DataError

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "good day"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]
PLAIN = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}" + (
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} </s> {% endgeneration %}"
    "{% else %}{{ m['content'] }} </s> {% endif %}{% endfor %}"
)
# Only the last assistant turn shows its thinking: a prefix is not rendered as it is within the whole.
UNSTABLE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if loop.last and m['role'] == 'assistant' %}think {% endif %}"
    "{{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def word_folder(folder: Path, template: str | None, *, bos: str | None = None) -> Path:
    special = ["</s>", "<s>", "<system>", "<user>", "<assistant>", "[UNK]"]
    words = [*special, "be", "brief", "hello", "there", "good", "day", "bye", "so", "long", "think"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token=bos, unk_token="[UNK]")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_byte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte")
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def reloaded_byte(saved_byte: Path):
    return AutoTokenizer.from_pretrained(str(saved_byte), local_files_only=True)


EDGES = [
    "",
    " ",
    "plain",
    " lead\ttabs \r\n",
    "\u00e9 e\u0301 \u00a0\u00ad",
    "\U0001f600\u200d\U0001f469\U0001f3fd\u200d\U0001f4bb",
    "\ufeff\u2028\ufffd\uffff\x00\x7f",
    "a <|eos|> <|bos|> b",
]


@pytest.mark.parametrize("text", EDGES)
def test_saved_byte_tokenizer_gives_equal_ids(reloaded_byte, text: str) -> None:
    assert reloaded_byte(text)["input_ids"] == ByteTokenizer().tokens(text).tolist() == list(text.encode())
    assert reloaded_byte.decode(reloaded_byte(text)["input_ids"]) == text


@given(st.text(max_size=60))
def test_saved_byte_tokenizer_gives_equal_ids_for_any_text(reloaded_byte, text: str) -> None:
    assert reloaded_byte(text)["input_ids"] == ByteTokenizer().tokens(text).tolist()


def test_saved_byte_tokenizer_reloads_as_a_folder(saved_byte: Path) -> None:
    byte, folder = ByteTokenizer(), load_tokenizer(str(saved_byte), None)
    assert (folder.size, folder.bos_id, folder.eos_id, folder.pad_id) == (259, 256, 257, 258)
    assert folder.encode("añ").tolist() == byte.encode("añ").tolist() == [256, 97, 0xC3, 0xB1, 257]
    assert byte.encode("añ").dtype == folder.encode("añ").dtype == np.int32
    for ours, theirs in zip(byte.encode_messages(CHAT), folder.encode_messages(CHAT), strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_byte_chat_trains_on_the_assistant_and_its_end_of_turn() -> None:
    ids, mask = ByteTokenizer().encode_messages(CHAT)
    assert bytes(ids[mask].astype(np.uint8)) == b"good day<|im_end|>\nso long<|im_end|>\n"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_chat_loss_mask_of_a_folder(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(str(word_folder(tmp_path, template)), None)
    ids, mask = tokenizer.encode_messages(CHAT)
    words = AutoTokenizer.from_pretrained(str(tmp_path)).convert_ids_to_tokens(ids.tolist())
    trained = " ".join(word for word, loss in zip(words, mask, strict=True) if loss)
    assert trained == "good day </s> so long </s>"
    assert " ".join(words).startswith("<system> be brief </s> <user> hello there </s> <assistant> good day </s>")


def test_a_template_without_stable_prefixes_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_folder(tmp_path, UNSTABLE)), None)
    with pytest.raises(DataError, match="generation") as failure:
        tokenizer.encode_messages(CHAT)
    assert str(tmp_path) in str(failure.value)
    assert not isinstance(failure.value, BadRecord)


def test_a_conversation_the_template_refuses_is_a_bad_record(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(str(word_folder(tmp_path, template)), None)
    with pytest.raises(BadRecord, match="roles must alternate"):
        tokenizer.encode_messages(CHAT)


def test_a_conversation_that_opens_with_the_assistant(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_folder(tmp_path, PLAIN)), None)
    with pytest.raises(BadRecord, match="speaks first"):
        tokenizer.encode_messages(CHAT[2:])


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_folder(tmp_path, None)), None)
    with pytest.raises(DataError, match="no chat template"):
        tokenizer.encode_messages(CHAT)


def test_document_marks_follow_the_tokenizer(tmp_path: Path) -> None:
    bare = load_tokenizer(str(word_folder(tmp_path / "a", None)), None)
    marked = load_tokenizer(str(word_folder(tmp_path / "b", None, bos="<s>")), None)
    assert bare.encode("good day")[-1] == bare.eos_id == 0
    assert len(bare.encode("good day")) == 3
    assert marked.encode("good day")[0] == marked.bos_id == 1
    assert bare.fingerprint != marked.fingerprint


def test_fingerprint_is_stable_and_sees_the_template(tmp_path: Path) -> None:
    folder = word_folder(tmp_path / "a", PLAIN)
    here = load_tokenizer(str(folder), None).fingerprint
    script = f"from lctrain.data.tokenizer import load_tokenizer as l; print(l({str(folder)!r}, None).fingerprint)"
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert here == there
    assert load_tokenizer(str(word_folder(tmp_path / "b", PLAIN)), None).fingerprint == here
    assert load_tokenizer(str(word_folder(tmp_path / "c", MARKED)), None).fingerprint != here


def test_saved_folder_keeps_the_fingerprint(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None, str(word_folder(tmp_path / "a", PLAIN)))
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(str(tmp_path / "b"), None).fingerprint == tokenizer.fingerprint


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data\.tokenizer=byte or a folder"):
        load_tokenizer(None, None)
    with pytest.raises(DataError, match=r"data\.tokenizer=.*nowhere.*local folder"):
        load_tokenizer(str(tmp_path / "nowhere"), None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match=r"model\.path=.* holds no tokenizer"):
        load_tokenizer(None, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(DataError, match="does not load"):
        load_tokenizer(str(tmp_path), None)


def test_check_fits() -> None:
    check_fits(ByteTokenizer(), 259)
    with pytest.raises(DataError, match=r"does not fit the model's vocabulary.*259.*258"):
        check_fits(ByteTokenizer(), 258)
