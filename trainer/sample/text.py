"""Between text and tokens: prompts, and text that grows by a token at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from trainer.data import Tokenizer
from trainer.errors import UserMistake

# Newest tokens that are decoded together: some tokenizers write a word's space depending on what precedes it, and a
# character has up to four bytes, each of which may be a token.
_NUM_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet


def encode_prompt(text: str, tokenizer: Tokenizer, context_length: int) -> tuple[int, ...]:
    """Tokens of a prompt, as training would have them.

    A document begins with a token of its own, or with the one that ends the one before; only a piece that fills the
    context, cut from a longer document, may do without.

    Args:
      text: the prompt.
      tokenizer: training's.
      context_length: tokens that the model can attend to.

    Returns:
      At least one token. More than the context holds, if the prompt is that long.

    Raises:
      UserMistake: the prompt has no token, and no token begins a document.
    """
    tokens = tuple(tokenizer.encode(text))
    begin = tokenizer.delimiters.begin
    if begin is None or len(tokens) >= context_length:
        if not tokens:
            raise UserMistake(f"the prompt {text!r} has no token to begin with, nor have documents; give some text")
        return tokens
    return (begin, *tokens)


class GrowingText:
    """Turns tokens into text as they come, never showing half a character.

    What has been shown never changes. Together it is the decoded text of all tokens, less that of the tokens before. A
    character is shown with the token that completes it: U+FFFD for a character that lacks bytes is held back until the
    next token.

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
        # Without what decoding leaves out: any number of special tokens may stand between a word and the next.
        spoken = (token for token in reversed(before) if not tokenizer.is_skipped(token))
        self._newest = list(itertools.islice(spoken, _NUM_CONTEXT_TOKENS))[::-1]

    def add(self, token: int) -> str:
        """The text that this token completes."""
        if self._tokenizer.is_skipped(token):
            return ""
        num_shown = len(self._complete())
        self._newest.append(token)
        shown = self._complete()[num_shown:]
        del self._newest[:-_NUM_CONTEXT_TOKENS]
        return shown

    def end(self) -> str:
        """The text that is held back, once no token is to come."""
        return self._tokenizer.decode(self._newest)[len(self._complete()) :]

    def _complete(self) -> str:
        """Of the newest tokens, without a character at the end that isn't complete."""
        text = self._tokenizer.decode(self._newest)
        return text.removesuffix(_REPLACEMENT * self._tokenizer.num_unfinished(self._newest))
