"""The errors that end a run with a message instead of a traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence


class UserMistake(ValueError):
    """Something that the user can put right: the message tells what was expected, what came, the remedy. Status 2."""


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message tells why, and what is left to resume from. Status 1."""


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
