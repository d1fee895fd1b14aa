"""Between text and tokens: prompts, stop tokens, and text that grows by a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data import Tokenizer
from trainer.errors import UserMistake

# Tokens before the newest that decoding is shown: some tokenizers write a word's space depending on what precedes it.
_NUM_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet


def encode_prompt(text: str, tokenizer: Tokenizer, context_length: int) -> tuple[int, ...]:
    """Tokens of a prompt, as training would have them.

    A document begins with the token that ends the one before; only a piece that fills the context, cut from a longer
    document, may do without.

    Args:
      text: the prompt.
      tokenizer: training's.
      context_length: tokens that the model can look back on.

    Returns:
      At least one token. More than the context holds, if the prompt is that long.
    """
    tokens = tuple(tokenizer.encode(text))
    return tokens if len(tokens) >= context_length else (tokenizer.end_of_document_id, *tokens)


def find_stop_token(stop: int | str | None, tokenizer: Tokenizer) -> int:
    """The token that ends a text.

    Args:
      stop: its id or text; None: the token that ends a document.
      tokenizer: training's.

    Raises:
      UserMistake: the tokenizer has no such token.
    """
    if stop is None:
        return tokenizer.end_of_document_id
    if isinstance(stop, int):
        if not 0 <= stop < tokenizer.vocab_size:
            raise UserMistake(
                f"--stop-token {stop} is not an id of the {tokenizer.name} tokenizer; "
                f"give one below {tokenizer.vocab_size:,}, or a token's text"
            )
        return stop
    found = tokenizer.find_token(stop)
    if found is None:
        raise UserMistake(
            f"--stop-token {stop!r} is {len(tokenizer.encode(stop))} tokens of the {tokenizer.name} tokenizer; "
            "give the text or the id of a single one"
        )
    return found


class GrowingText:
    """Turns tokens into text as they come, never showing half a character.

    A token may hold a part of a character's bytes. Decoded too soon it gives U+FFFD, so a text's last U+FFFD is held
    back until the next token shows whether it was one.

    Args:
      tokenizer: training's.
      before: the tokens that the text continues.

    >>> from trainer.data import ByteTokenizer
    >>> text = GrowingText(ByteTokenizer())
    >>> [text.add(byte) for byte in "né!".encode()], text.end()
    (['n', '', 'é', '!'], '')
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context = list(before[-_NUM_CONTEXT_TOKENS:])
        self._new: list[int] = []
        self._num_shown = 0

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self._new.append(token)
        text = self._text()
        complete = text.removesuffix(_REPLACEMENT)
        shown = complete[self._num_shown :]
        self._num_shown = len(complete)
        if complete == text:
            self._context = (self._context + self._new)[-_NUM_CONTEXT_TOKENS:]
            self._new, self._num_shown = [], 0
        return shown

    def end(self) -> str:
        """The text that is held back, once no token is to come."""
        return self._text()[self._num_shown :]

    def _text(self) -> str:
        """Of the tokens that aren't wholly shown yet."""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._new])[len(before) :]
