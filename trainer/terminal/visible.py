"""Text from outside (data, names of files and columns, tokenizers, pages) in a form that no terminal obeys.

What is printed for people passes here: `Console`'s lines, standard error (`trainer/process/standard_streams.py`) and
the texts of `trainer.sample` on a terminal. Files hold what was written.
"""

from __future__ import annotations

# Unicode has a picture of each control character, and none of the second set, U+0080 to U+009F.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """The text with visible signs in the place of control characters, except line ends and tabs.

    >>> visible("red: \\x1b[31m")
    'red: ␛[31m'
    """
    return text.translate(_PICTURES)
