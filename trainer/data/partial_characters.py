"""Characters whose UTF-8 is spread over several tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

# How ByteFallback (Llama 2, Mistral, Gemma) names bytes; its parser takes a plus sign for a zero.
_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


def bytes_at_end(tokens: Sequence[str]) -> bytes:
    """The bytes that the last tokens of a byte-fallback tokenizer name, back to the last token that names none."""
    data = bytearray()
    for token in reversed(tokens):
        found = _BYTE_TOKEN.fullmatch(token)
        if found is None:
            break
        data.append(int(found[1], 16))
    return bytes(reversed(data))


def keep_characters_apart(tokens: Sequence[str]) -> list[str]:
    """Puts an empty token between the characters that byte tokens spell.

    `tokenizers`' ByteFallback decodes neighbouring byte tokens together: a single invalid byte makes all of them
    U+FFFD, the characters before it included. An empty token ends such a run. Then each character stands for itself and
    each invalid byte is one U+FFFD, as in SentencePiece, whose tokenizers these are.

    >>> keep_characters_apart(["a", "<0xC3>", "<0xA9>", "<0xE6>", "b"])
    ['a', '<0xC3>', '<0xA9>', '', '<0xE6>', 'b']
    """
    apart: list[str] = []
    for are_bytes, run in itertools.groupby(tokens, lambda token: _BYTE_TOKEN.fullmatch(token) is not None):
        left = list(run)
        # "surrogateescape" makes one character of each invalid byte.
        characters = bytes_at_end(left).decode(errors="surrogateescape") if are_bytes else ""
        for character in characters[:-1]:
            length = len(character.encode(errors="surrogateescape"))
            apart += [*left[:length], ""]
            del left[:length]
        apart += left
    return apart


def byte_level_bytes(tokens: Iterable[str]) -> bytes:
    """The bytes that tokens of a byte-level tokenizer (GPT-2, Llama 3) stand for."""
    return b"".join(
        bytes(_BYTE_OF[character] for character in token) if _BYTE_OF.keys() >= set(token) else token.encode()
        for token in tokens
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: the printable ones of Latin-1 for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
