"""Reads conversations: rows of JSON-lines or Parquet with the turns of one each.

    {"messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4", "weight": 0.5}]}

Or with `prompt` and `completion`, a user's text and the assistant's. A turn's other fields, such as `tool_calls`, are
the template's to read, and so are a row's `tools`. A `weight` multiplies the loss: of an assistant's turn, or of a row.
Other fields of a row are passed over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.files import OpenFile
from trainer.data.formats import HEAD_BYTES, find_format
from trainer.data.readers import (
    LinePlace,
    check_weight,
    json_name,
    names_of,
    object_of_line,
    read_lines,
    read_parquet_rows,
)
from trainer.errors import DataError

ASSISTANT = "assistant"
_COLUMNS = ("messages", "prompt", "completion", "tools", "weight")


class ChatPlace(NamedTuple):
    """The place of a conversation: a line of a text file, from 1, or a row of a Parquet file, from 0."""

    path: Path
    number: int
    is_row: bool

    def __str__(self) -> str:
        return f"{self.path}: row {self.number}" if self.is_row else f"{self.path}:{self.number}"


class Chat(NamedTuple):
    """A conversation."""

    messages: list[dict[str, Any]]
    """Each has a `role`; none has a `weight`."""
    tools: list[Any] | None
    weight: float
    """Of the row."""
    turn_weights: dict[int, float]
    """Of the assistant's turns that have one, by their indices in `messages`."""
    place: ChatPlace

    @property
    def assistant_turns(self) -> list[int]:
        """The indices of the assistant's turns."""
        return [index for index, message in enumerate(self.messages) if message["role"] == ASSISTANT]


def read_chats(path: Path) -> Iterator[Chat]:
    """The conversations of a file: Parquet by its first bytes, otherwise JSON-lines, compressed or not.

    Raises:
        DataError: a row holds no conversation; names the row.
    """
    try:
        kind = find_format(OpenFile(path).read(HEAD_BYTES, offset=0))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the file, or leave it out") from error
    if kind is None or kind.source != "parquet":
        yield from read_lines(path, _chat_of_line)
        return
    rows = read_parquet_rows(path, functools.partial(_choose_columns, path), lambda batch: iter(batch.to_pylist()))
    for number, row in enumerate(rows):
        yield _chat_of(_without_nulls(row), ChatPlace(path, number, is_row=True))


def _chat_of_line(line: bytes, where: LinePlace) -> Chat | None:
    record = object_of_line(line, where, parse_int=int)
    return None if record is None else _chat_of(record, ChatPlace(where.path, where.number, is_row=False))


def _choose_columns(path: Path, schema: Any) -> list[str]:
    found = [name for name in _COLUMNS if name in schema.names]
    if "messages" not in found and not {"prompt", "completion"} <= {*found}:
        raise DataError(
            f"{path}: expected columns 'messages', or 'prompt' and 'completion'; it has {names_of(schema.names)}"
        )
    return found


def _without_nulls(value: Any) -> Any:
    """A row without the nulls that stand in Parquet for a field that other rows have; `content` keeps its own."""
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if each is not None or name == "content"}
        return {name: _without_nulls(each) for name, each in kept.items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _chat_of(record: dict[str, Any], place: ChatPlace) -> Chat:
    weight = _weight_of(record, str(place))
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: field 'tools' is {json_name(tools)}, expected an array")
    messages: list[dict[str, Any]] = []
    turn_weights: dict[int, float] = {}
    for index, message in enumerate(_messages_of(record, place)):
        name = f"{place}: messages[{index}]"
        if not isinstance(message, dict):
            raise DataError(f'{name} is {json_name(message)}, expected an object {{"role": …, "content": …}}')
        if not isinstance(message.get("role"), str):
            raise DataError(f"{name}: field 'role' is {json_name(message.get('role'))}, expected text")
        if message.get("weight") is not None:
            if message["role"] != ASSISTANT:
                raise DataError(
                    f"{name}: a weight of a turn of {message['role']!r}; the assistant's turns have weights: leave it "
                    "out, or give the row one"
                )
            turn_weights[index] = _weight_of(message, name)
        messages.append({key: value for key, value in message.items() if key != "weight"})
    return Chat(messages, tools, weight, turn_weights, place)


def _messages_of(record: dict[str, Any], place: ChatPlace) -> list[Any]:
    messages = record.get("messages")
    if messages is None and {"prompt", "completion"} <= record.keys():
        texts = {"user": record["prompt"], ASSISTANT: record["completion"]}
        for field, text in zip(("prompt", "completion"), texts.values(), strict=True):
            if not isinstance(text, str):
                raise DataError(
                    f"{place}: field {field!r} is {json_name(text)}, expected text; give turns as 'messages'"
                )
        return [{"role": role, "content": text} for role, text in texts.items()]
    if messages is None:
        raise DataError(
            f"{place}: expected a field 'messages', or 'prompt' and 'completion'; it has {names_of(list(record))}"
        )
    if not isinstance(messages, list) or not messages:
        had = "empty" if messages == [] else json_name(messages)
        raise DataError(f"{place}: field 'messages' is {had}, expected an array of turns")
    return messages


def _weight_of(record: dict[str, Any], place: str) -> float:
    weight = record.get("weight")
    return 1.0 if weight is None else check_weight(weight, place)
