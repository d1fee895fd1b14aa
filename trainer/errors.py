"""The errors that end a run with a message instead of a traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOST_CHARACTERS = 1_200
_MOST_LINES = 80


def shorten(text: str, most: int = _MOST_CHARACTERS) -> str:
    """A text without its middle, if it is long: a message repeats what came, and that may be a whole file.

    Args:
      text: a line.
      most: characters that may stay. The end is among them: there a message has its remedy.

    >>> shorten("expected a path, got " + 1000 * "x" + "; name a file", 100)
    'expected a path, got xxxxxxxxxxxxxxxxxxx … (974 characters) … xxxxxxx; name a file'
    """
    if len(text) <= most:
        return text
    kept = most - 40  # so that the whole of it isn't shortened again
    first = 2 * kept // 3
    return f"{text[:first]} … ({len(text) - kept:,} characters) … {text[first - kept :]}"


def name_some(values: Sequence[object], most: int = 3) -> str:
    """The first of some values, and how many more there are.

    >>> name_some(("a.txt", "b.txt", "c.txt")), name_some([f"{name}.txt" for name in "abcdefg"])
    ("'a.txt', 'b.txt', 'c.txt'", "'a.txt', 'b.txt', 'c.txt' and 4 more")
    """
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(repr, values[:most])) + more


def _readable(message: str) -> str:
    lines = [shorten(line) for line in message.split("\n")]
    if len(lines) > _MOST_LINES:
        kept = _MOST_LINES - 1
        first = 2 * kept // 3
        lines[first : first - kept] = [f"… ({len(lines) - kept:,} lines) …"]
    return "\n".join(lines)


class UserMistake(ValueError):
    """Something that the user can put right: the message tells what was expected, what came, the remedy. Status 2."""

    def __init__(self, message: str):
        super().__init__(_readable(message))


class DataError(UserMistake):
    """Data that cannot be trained on; the message names the file, the place in it, and the remedy."""


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message tells why, and what is left to resume from. Status 1."""

    def __init__(self, message: str):
        super().__init__(_readable(message))


class DataUsedUpError(TrainingFailed):
    """No document is left. Processes that train together find this out at the same batch."""


def name_flags(message: str, arguments: Sequence[str]) -> str:
    """A message about a config, with each `field=value` that came from the command line named as it was typed there.

    Args:
      message: names fields as the config does: `section.field`, those of the model with or without their section.
      arguments: the command line's. What a config file is refused for stays as the file says it.

    >>> name_flags("num_steps=0 must be at least 1", ["--config", "gpt.py", "--num-steps", "0"])
    '--num-steps=0 must be at least 1'
    """
    if message.startswith("config "):
        return message
    for argument in arguments:
        typed = re.match(r"--([\w.-]+)", argument)
        if typed:
            field = re.escape(typed[1].replace("-", "_").removeprefix("model."))
            message = re.sub(rf"(?<![\w.-])(?:model\.)?{field}(?==)", typed[0].replace("_", "-"), message)
    return message
