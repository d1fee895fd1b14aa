"""Text in which lines are hidden: cut into lines, tokenized once, and repeated as often as a context needs.

Shapes: T tokens of the haystack, L lines.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64

from trainer.data import Tokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks.encoding import encode_lines

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The haystack of RULER's first single-needle task, and of its variable tracking."""

_MAX_LINE_CHARACTERS = 256
# Published tokenizers join no newline with a character after it that isn't white space. Many join several newlines, and
# some a newline with the indentation after it.
_LINE_END = re.compile(r"\n(?=\S)")
_INDENTED_LINE_END = re.compile(r"\n(?=[^\S\n]*\S)")
_SENTENCE_END = re.compile(r"""[.!?]["')\]”’]*(?= )""")
_WORD_END = re.compile(r"(?<=\S)(?=\s)")
_LINES_AT_ONCE = 4096


def split_lines(text: str) -> Iterator[str]:
    """Cuts a text into lines, where a line may be put between any two.

    A line ends where the next one isn't indented. A longer one than 256 characters is cut before an indented line, or
    else wrapped: a newline replaces the space after a sentence, or else after a word.

    Args:
        text: the text.

    Yields:
        Lines of at least one character and at most 257. Each ends in a newline.

    Example:
        >>> list(split_lines("if a:\\n    b()\\nc()"))
        ['if a:\\n    b()\\n', 'c()\\n']
    """
    start = 0
    while start < len(text):
        limit = start + _MAX_LINE_CHARACTERS
        found = _LINE_END.search(text, start, limit + 1)  # one more, for the character after the newline
        if found is not None:
            yield text[start : found.end()]
            start = found.end()
        elif limit >= len(text):
            yield text[start:].removesuffix("\n") + "\n"
            return
        else:
            window = text[start:limit]
            ends = [match.end() for match in _INDENTED_LINE_END.finditer(window)]
            stop = ends[-1] if ends else window.rfind("\n") + 1
            if stop:
                yield window[:stop]
            else:
                ends = [match.end() for match in _SENTENCE_END.finditer(window)]
                stop = ends[-1] if ends else window.rfind(" ", 1)
                if stop > 0:
                    yield window[:stop] + "\n"
                    stop += 1
                else:
                    yield window + "\n"
                    stop = len(window)
            start += stop


@dataclass(frozen=True)
class Haystack:
    """A tokenized text, long enough for a context that begins at any of its first lines.

    Args:
        tokenizer: its tokenizer.
        lines: the lines of the text, which is repeated from its end on.
        tokens: [T] tokens of the lines.
        ends: [L] index of the token after each line.
        num_starts: a context may begin at one of this many lines.
    """

    tokenizer: Tokenizer
    lines: Sequence[str]
    tokens: Int32[np.ndarray, " T"]
    ends: Int64[np.ndarray, " L"]
    num_starts: int

    def hide(
        self, start: int, num_tokens: int, hidden: Sequence[Int32[np.ndarray, " H"]], fractions: Sequence[float]
    ) -> Int32[np.ndarray, " C"]:
        """Some of the haystack's lines, with other lines between them.

        Args:
            start: the line that is the first one, below `num_starts`.
            num_tokens: most tokens of the haystack to take. The last line is cut after a word.
            hidden: tokens of lines. Each goes between two lines of the haystack.
            fractions: of the haystack's tokens, the part that is before each hidden line, to within half a line.
                Hidden lines of the same place keep their order.
        """
        begin = int(self.ends[start - 1]) if start else 0
        stop = int(np.searchsorted(self.ends, begin + num_tokens, side="right"))
        ends = self.ends[start:stop] - begin
        num_whole = int(ends[-1]) if len(ends) else 0
        last_line = self._begin_line(stop, num_tokens - num_whole)
        haystack = np.concatenate([self.tokens[begin : begin + num_whole], last_line])
        places = np.unique(np.concatenate([[0], ends, [len(haystack)]]))
        pieces: list[np.ndarray] = []
        last = 0
        for number in np.argsort(fractions, kind="stable").tolist():
            place = int(places[np.abs(places - fractions[number] * len(haystack)).argmin()])
            pieces += [haystack[last:place], hidden[number]]
            last = place
        return np.concatenate([*pieces, haystack[last:]]).astype(np.int32)

    def _begin_line(self, line: int, num_tokens: int) -> Int32[np.ndarray, " T"]:
        """The most words of a line, and a newline, that have at most this many tokens. It may be none."""
        text = self.lines[line % len(self.lines)]
        ends = [match.end() for match in _WORD_END.finditer(text)]
        if len(ends) < 2:  # no spaces, as in Chinese
            ends = list(range(1, len(text)))
        cuts = encode_lines(self.tokenizer, [text[:end] + "\n" for end in ends])
        fitting = [cut for cut in cuts if len(cut) <= num_tokens]
        return max(fitting, key=len, default=np.zeros(0, np.int32))


def tokenize_haystack(text: str, tokenizer: Tokenizer, length: int) -> Haystack:
    """Tokenizes as much of a text as contexts need.

    Contexts may begin at any line of the text's first `length` characters, whatever the tokenizer. So contexts of
    several tokenizers have the same text, as far as each goes.

    Args:
        text: any text. It is repeated if it is too short.
        tokenizer: the model's.
        length: tokens of a context.

    Raises:
        UserMistake: the text has no tokens.
    """
    lines: list[str] = []
    encoded: list[np.ndarray] = []
    num_starts = num_characters = num_tokens = num_before = 0
    remaining = split_lines(text)
    is_whole = False
    while num_tokens - num_before <= length:
        batch = list(itertools.islice(remaining, _LINES_AT_ONCE))
        if not batch:
            is_whole = True
            break
        for line, ids in zip(batch, encode_lines(tokenizer, batch), strict=True):
            if num_characters < length:
                num_starts, num_before = num_starts + 1, num_tokens
            num_characters += len(line)
            num_tokens += len(ids)
            encoded.append(ids)
        lines += batch
    if not num_tokens:
        raise UserMistake(f"the haystack, of {len(text):,} characters, has no tokens; give a text, such as NOISE")
    tokens = np.concatenate(encoded)
    ends = np.cumsum([len(ids) for ids in encoded])
    if is_whole:
        num_copies = -(-(num_before + length) // num_tokens) + 1
        tokens = np.tile(tokens, num_copies)
        ends = (ends + num_tokens * np.arange(num_copies)[:, None]).ravel()
    return Haystack(tokenizer, lines, tokens, ends, num_starts)
