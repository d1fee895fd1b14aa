"""Renders a conversation, and finds the parts of its text that the loss is measured on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from trainer.config import ChatLoss
from trainer.data.chat_encoding import ChatEncoder
from trainer.data.chat_reader import Chat
from trainer.data.chat_template import GENERATION_MARKS, ChatTemplate, TemplateRefuses
from trainer.errors import DataError


class TurnText(NamedTuple):
    """A part of a text that the assistant writes, in characters."""

    start: int
    stop: int
    weight: float


class RenderedChat(NamedTuple):
    """The text of a conversation."""

    protected: str
    """The text, with other characters where a message spells a special token: see `ChatEncoder`."""
    turns: list[TurnText]
    """Parts with weights of their own, in order."""
    weight: float
    """Of all other tokens."""
    num_bytes: int
    """Of the text in UTF-8."""


def render_chat(chat: Chat, template: ChatTemplate, encoder: ChatEncoder, loss: ChatLoss) -> RenderedChat:
    """Renders a conversation.

    Args:
        chat: the conversation.
        template: the template.
        encoder: keeps its messages' special tokens apart.
        loss: on the assistant's turns, on all tokens, or on the assistant's last turn.

    Raises:
        DataError: the template refuses it, no part of its text is known to be the assistant's, or a text in it can't
            be distinguished from a special token; names its place.
    """
    if loss != "all" and not chat.assistant_turns:
        raise DataError(f"{chat.place}: no turn of the assistant, which the loss would be of; drop the chat")
    try:
        text = template.render(chat.messages, chat.tools)
        protected, generated = _split_marks(
            template.render(encoder.protect(chat.messages), encoder.protect(chat.tools), marks_generation=True)
        )
        num_bytes = len(text.encode())
    except TemplateRefuses as refused:
        raise DataError(f"{chat.place}: the chat template refuses this chat: {refused}") from refused
    except ValueError as refused:
        raise DataError(f"{chat.place}: the chat can't be tokenized: {refused}") from refused
    if encoder.restore(protected) != text:
        raise DataError(
            f"{chat.place}: a message spells a special token, and {template.place} makes another text of it than of "
            "other words, so that nobody can tell whose token it is; take it out of the message"
        )
    if not text:
        raise DataError(f"{chat.place}: the chat template makes an empty text of this chat; drop it")
    if template.tells_generation(with_tools=chat.tools is not None):
        turns = _weigh_generated(chat, template, generated, loss)
    else:
        turns = _added_turns(chat, template, text, loss)
    return RenderedChat(protected, turns, chat.weight if loss == "all" else 0.0, num_bytes)


def _split_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without `GENERATION_MARKS`, and the parts of it between them."""
    opened, closed = GENERATION_MARKS
    text, parts, starts, length = [], [], [], 0
    for piece in re.split(f"([{opened}{closed}])", marked):
        if piece == opened:
            starts.append(length)
        elif piece == closed:
            parts.append((starts.pop() if starts else length, length))
        else:
            text.append(piece)
            length += len(piece)
    return "".join(text), parts


def _weigh_generated(
    chat: Chat, template: ChatTemplate, parts: Sequence[tuple[int, int]], loss: ChatLoss
) -> list[TurnText]:
    """The parts that the template says are the assistant's, with their weights."""
    chosen = chat.assistant_turns
    if (chat.turn_weights or loss == "last") and len(parts) != len(chosen):
        raise DataError(
            f"{chat.place}: {template.place} has {len(parts)} parts between generation tags for {len(chosen)} turns of "
            "the assistant, so that nobody can tell which belongs to which turn; leave out the turns' weights, and "
            "data.chat.loss='last'"
        )
    of_parts = [chat.turn_weights.get(index, 1.0) * chat.weight for index in chosen]
    of_parts = of_parts if len(of_parts) == len(parts) else [chat.weight] * len(parts)
    turns = [TurnText(start, stop, weight) for (start, stop), weight in zip(parts, of_parts, strict=True)]
    return turns[-1:] if loss == "last" else turns


def _added_turns(chat: Chat, template: ChatTemplate, text: str, loss: ChatLoss) -> list[TurnText]:
    """What each turn of the assistant adds to the text, with its weight."""
    turns = []
    for index in chat.assistant_turns[-1:] if loss == "last" else chat.assistant_turns:
        try:
            before = template.render(chat.messages[:index], chat.tools, add_generation_prompt=True)
            after = template.render(chat.messages[: index + 1], chat.tools)
        except TemplateRefuses as refused:
            raise DataError(f"{chat.place}: the chat template refuses the turns before {index}: {refused}") from refused
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{chat.place}: messages[{index}]: the text up to this turn of the assistant isn't how the whole "
                f"chat's begins, so that nobody can tell what the turn adds: {template.place} renders earlier turns "
                "otherwise than the last; set data.chat.template to one with generation tags, or data.chat.loss to last"
            )
        turns.append(TurnText(len(before), len(after), chat.turn_weights.get(index, 1.0) * chat.weight))
    return turns
