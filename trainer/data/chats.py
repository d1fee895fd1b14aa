"""Weights of the tokens of chats, and the places that chats may be cut at.

Shapes: W spans of tokens of one weight, E ends of turns, C chats, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from trainer.config import TooLong
from trainer.data.chat_reader import ChatPlace

SPAN_DTYPE = np.dtype([("start", "<i8"), ("weight", "<f4")])
CHAT_DTYPE = np.dtype([("start", "<i8"), ("file", "<i4"), ("number", "<i8"), ("is_row", "?")])


@dataclass(frozen=True)
class ChatSpans:
    """What a flat array of the tokens of chats has beside them. Places count from the array's first token.

    Args:
        spans: [W] records of `SPAN_DTYPE`: a weight, and the first token that has it. The first begins at 0.
        turn_ends: [E] places behind the assistant's turns that the loss is of, rising.
        chats: [C] records of `CHAT_DTYPE`, by their first tokens: where each was read.
        files: that they were read from.
        too_long: what becomes of a chat that is longer than a sequence.
    """

    spans: np.ndarray
    turn_ends: Int64[np.ndarray, " E"]
    chats: np.ndarray
    files: tuple[Path, ...]
    too_long: TooLong

    def weights(self, start: int, stop: int) -> Float32[np.ndarray, " L"]:
        """The weights of the tokens [start, stop)."""
        begins = self.spans["start"]
        first, last = np.searchsorted(begins, (start, stop - 1), side="right") - 1
        bounds = np.clip(np.append(begins[first : last + 1], stop), start, stop)
        return np.repeat(self.spans["weight"][first : last + 1], np.diff(bounds))

    def cut(self, starts: Int64[np.ndarray, " C"], most: int) -> Int64[np.ndarray, " C"]:
        """The tokens that are left of chats that are too long; 0: the chat is dropped.

        Args:
            starts: their first tokens.
            most: tokens that a chat may keep; fewer than each of these has.
        """
        if self.too_long == "drop":
            return np.zeros_like(starts)
        last = np.searchsorted(self.turn_ends, starts + most, side="right")
        return np.maximum(np.append(0, self.turn_ends)[last] - starts, 0)

    def place_of(self, start: int) -> ChatPlace:
        """The place of the chat whose first token is this one."""
        _, file, number, is_row = self.chats[np.searchsorted(self.chats["start"], start)].item()
        return ChatPlace(self.files[file], number, is_row)


def spans_of(weights: Float32[np.ndarray, " L"], start: int) -> np.ndarray:
    """The records of `SPAN_DTYPE` of a chat's tokens.

    Args:
        weights: of the tokens; at least one.
        start: place of the first.
    """
    changes = np.flatnonzero(np.diff(weights, prepend=np.float32(np.nan)) != 0)
    spans = np.zeros(len(changes), SPAN_DTYPE)
    spans["start"], spans["weight"] = start + changes, weights[changes]
    return spans
