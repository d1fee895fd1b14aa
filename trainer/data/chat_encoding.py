"""Encodes rendered chats: the template's special tokens become tokens, and such as a user's text spells stay text.

A chat is rendered twice: as it is, and with another character, a private one of Unicode's, in place of each character
by which a message spells a special token. Where both renderings are the same text, all special tokens of the second are
the template's own. Where they differ, the template looks into the messages' special tokens, or cuts or changes them,
and the chat is refused.

For the tokenizer the template's special tokens are spelled by private characters, too, so that no text becomes them.
These are as many as the token's name has, so that places in the text stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt32

from trainer.data.tokenizers import HuggingFaceTokenizer

# Of plane 16, all of whose characters are private: the first for what stands for a character of a user's text, those
# from the second on for what begins a special token, and one that fills its name up.
_OF_TEXT, _OF_TOKENS, _FILL = 0x100000, 0x101000, "\U0010fffb"
_PRIVATE = re.compile("[\U00100000-\U0010ffff]")
# Fields of a message that say what it is, and of which a template may make a special token.
_KINDS = frozenset({"role", "type"})


class EncodedText(NamedTuple):
    """The tokens of a text, and the characters that each stands for."""

    ids: UInt32[np.ndarray, " L"]
    first: Int64[np.ndarray, " L"]
    """The first character of each token."""
    stop: Int64[np.ndarray, " L"]
    """The character behind its last."""

    def overlaps(self, start: int, stop: int) -> Bool[np.ndarray, " L"]:
        """True for the tokens that stand for some character of a part of the text."""
        return (self.first < stop) & (self.stop > start)


class ChatEncoder:
    """Encodes rendered chats.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        names = tokenizer.special_names()
        stand_ins = {name: chr(_OF_TOKENS + i) + _FILL * (len(name) - 1) for i, name in enumerate(names)}
        assert len(names) < ord(_FILL) - _OF_TOKENS, "a vocabulary has fewer special tokens"
        self._tokenizer, (self._encoder, self._stand_ins) = tokenizer, tokenizer.respelled(stand_ins)
        self._names = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        self._every_name = names
        self._beginnings = tuple({name[:end] for name in names for end in range(1, len(name))})
        self._ends = tuple({name[start:] for name in names for start in range(1, len(name))})
        characters = sorted({character for name in names for character in name})
        self._aliases = {ord(character): _OF_TEXT + number for number, character in enumerate(characters)}
        self._originals = {alias: character for character, alias in self._aliases.items()}

    def protect(self, value: Any) -> Any:
        """Messages, or a part of them, with other characters where a text spells a special token or a part of one.

        Raises:
            ValueError: a text holds a character of those that stand for others here.
        """
        if isinstance(value, dict):
            return {
                name: each if name in _KINDS and not self._spells_token(each) else self.protect(each)
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self.protect(each) for each in value]
        return self._protect_text(value) if isinstance(value, str) else value

    def restore(self, text: str) -> str:
        """The text that the characters of `protect` stand for."""
        return text.translate(self._originals)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokens of rendered texts.

        Args:
            texts: of protected messages. All special tokens that they spell become tokens.

        Raises:
            ValueError: a text can't be encoded, or is special and can't be spelled otherwise.
        """
        spelled = [self.restore(self._names.sub(self._stand_in, text)) for text in texts]
        encoded = []
        for text, encoding in zip(texts, self._encode(spelled), strict=True):
            first, stop = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            tokens = EncodedText(np.array(encoding.ids, np.uint32), first, stop)
            own = np.array([match.start() for match in self._names.finditer(text)], np.int64)
            is_own = np.searchsorted(own, stop) > np.searchsorted(own, first)
            self._tokenizer.check_text(tokens.ids[~is_own])
            encoded.append(tokens)
        return encoded

    def _encode(self, texts: list[str]) -> Any:
        try:
            return self._encoder.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare ones
            raise ValueError(str(error)) from error

    def _stand_in(self, match: re.Match[str]) -> str:
        return self._stand_ins.get(match[0], match[0])

    def _spells_token(self, value: Any) -> bool:
        return isinstance(value, str) and self._names.search(value) is not None

    def _protect_text(self, text: str) -> str:
        if private := _PRIVATE.search(text):
            raise ValueError(
                f"it holds the private character U+{ord(private[0]):X}, which stands for others while a chat is "
                "rendered; take it out"
            )
        characters = list(text)
        if self._spells_token(text):
            for name in self._every_name:
                start = text.find(name)
                while start >= 0:
                    for place in range(start, start + len(name)):
                        characters[place] = chr(self._aliases[ord(text[place])])
                    start = text.find(name, start + 1)
        # Texts that stand side by side, or beside the template's, may make a special token together.
        core = text.strip()
        if core and (core.startswith(self._ends) or any(core in name for name in self._every_name)):
            place = len(text) - len(text.lstrip())
            characters[place] = chr(self._aliases[ord(text[place])])
        if core and core.endswith(self._beginnings):
            place = len(text.rstrip()) - 1
            characters[place] = chr(self._aliases[ord(text[place])])
        return "".join(characters)
