"""What a record may hold, and the error of one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lctrain.errors import DataError

Messages: TypeAlias = "list[dict[str, Any]]"
Content: TypeAlias = "str | Messages"


class BadRecord(DataError):
    """One record that cannot become a document; data.on_bad_record says what follows."""


def checked_text(text: object, field: str) -> str:
    """`text` if it is a string with something to read in it. Raises BadRecord."""
    if not isinstance(text, str):
        raise BadRecord(f"field `{field}` must be text, not {type(text).__name__}")
    if not text.strip():
        raise BadRecord(f"field `{field}` is empty: a document with no tokens")
    _check_unicode(text, field)
    return text


def checked_messages(messages: object, field: str) -> Messages:
    """`messages` if it is a conversation in which the assistant speaks. Raises BadRecord."""
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"field `{field}` must be a list of messages that is not empty")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRecord(f"message {number} of `{field}` must have a `role` and a `content`, both text")
        _check_unicode(message["content"], field)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord(f"`{field}` has no message of role `assistant`, and only those carry loss")
    return messages


def content_of(record: object, *, text_field: str, messages_field: str) -> Content:
    """The conversation of a record that has one, else its text. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"a record must be an object with fields, not {type(record).__name__}")
    if record.get(messages_field) is not None:
        return checked_messages(record[messages_field], messages_field)
    if record.get(text_field) is not None:
        return checked_text(record[text_field], text_field)
    found = ", ".join(sorted(map(str, record))) or "none"
    raise BadRecord(
        f"has neither `{text_field}` nor `{messages_field}` (fields: {found}); "
        "name yours with data.text_field or data.messages_field"
    )


def read_record(
    record: Any, parse: Callable[[Any], object] | None = None, /, *, text_field: str, messages_field: str
) -> Content | BadRecord:
    """The content of a record, after `parse`, or the BadRecord that stood in the way, as a value."""
    try:
        return content_of(
            record if parse is None else parse(record), text_field=text_field, messages_field=messages_field
        )
    except BadRecord as problem:
        return problem


def _check_unicode(text: str, field: str) -> None:
    # JSON can spell half of a surrogate pair (\ud800), which no UTF-8 and no tokenizer can hold.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"field `{field}` holds half of a surrogate pair at character {error.start}") from error
