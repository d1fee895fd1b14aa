"""The text of tokens, a character at a time where several tokens spell one.

Shapes: L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from trainer.data import HuggingFaceTokenizer, Tokenizer
from trainer.data.tokenizers import PretokenizedIds

# A character has up to four bytes.
_MOST_TOKENS_OF_A_CHARACTER = 4
_NUM_TOKENS_BEFORE = 8
_NO_CHARACTER = "\ufffd"


class TokenText(NamedTuple):
    """The text of one token, or of a few that only together spell whole characters."""

    text: str
    ids: tuple[int, ...]
    weight: float | None
    """Weight of the loss on each of the tokens; None: they are no targets."""
    is_special: bool = False


def texts_of(
    tokenizer: Tokenizer, ids: Int32[np.ndarray, " L"], weights: Float32[np.ndarray, " L"], before: Sequence[int] = ()
) -> list[TokenText]:
    """The texts of tokens, which joined are what the tokenizer decodes, but that U+FFFD may come more often.

    Args:
        tokenizer: of the tokens. One that isn't known has the ids themselves for texts.
        ids: the tokens.
        weights: of the loss on them; NaN: they are no targets.
        before: the tokens before them, on which a word's space may depend.
    """
    tokens, found = ids.tolist(), []
    spoken = [token for token in before if not tokenizer.is_skipped(token)]
    of_tokens = [None if np.isnan(weight) else float(weight) for weight in weights]
    place = 0
    while place < len(tokens):
        token, weight = tokens[place], of_tokens[place]
        if tokenizer.is_skipped(token):
            found.append(TokenText(_name_of(tokenizer, token), (token,), weight, is_special=True))
            place += 1
            continue
        group = [token]
        text = _added(tokenizer, spoken, group)
        if text.endswith(_NO_CHARACTER):
            group, text = _whole_character(tokenizer, spoken, tokens[place:], of_tokens[place:]) or (group, text)
        found.append(TokenText(text, tuple(group), weight))
        spoken = [*spoken, *group][-_NUM_TOKENS_BEFORE:]
        place += len(group)
    return found


def _whole_character(
    tokenizer: Tokenizer, spoken: Sequence[int], tokens: Sequence[int], weights: Sequence[float | None]
) -> tuple[list[int], str] | None:
    """The first tokens that together spell whole characters, of one weight; None: they don't, as bytes that aren't
    UTF-8."""
    for num in range(2, _MOST_TOKENS_OF_A_CHARACTER + 1):
        group = list(tokens[:num])
        if len(group) < num or weights[num - 1] != weights[0] or tokenizer.is_skipped(group[-1]):
            return None
        text = _added(tokenizer, spoken, group)
        if text and _NO_CHARACTER not in text:
            return group, text
    return None


def _added(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add to those before them."""
    if isinstance(tokenizer, PretokenizedIds):
        return "".join(f"{token} " for token in tokens)
    text, all_text = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    # Bytes before them may become a character with theirs.
    return all_text[len(text) :] if all_text.startswith(text) else tokenizer.decode(tokens)


def _name_of(tokenizer: Tokenizer, token: int) -> str:
    """The name of a special token, or of an id that is no token."""
    name = tokenizer.token(token) if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return name or f"<{token}>"
