"""The declaration of a config field: its default, its bounds, and the consequence of a change when a run resumes.

    num_kept: int = option(3, "free", AT_LEAST_1)

The docstring below a field is its help text on the command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_type_hints

from layers.checks import check_numbers

Change = Literal[
    "free",
    "training",
    "schedule",
    "phases",
    "evaluation",
    "sequences",
    "corpus",
    "model",
    "optimizer",
    "tokenizer",
    "seed",
    "beginning",
]
"""The part of a run that a change of a field touches when the run resumes.

- free: no parameter and no loss, except by the order of floating-point sums
- training: how later steps train
- schedule: the learning rate of every later step
- phases: all steps of a phase; refused for phases that have begun, but for their length
- evaluation: how a validation loss is measured, and how later steps train; see `evaluation_settings`
- sequences: how documents are packed; the epoch goes on with the documents that are left of it
- corpus: where the documents are, and which are evaluated; digests tell whether they are still the same
- model, optimizer, tokenizer, seed, beginning: refused, for the reasons in `trainer/config/resume_changes.py`
"""


class Bound(NamedTuple):
    """A condition on a number."""

    is_broken: Callable[[float], bool]
    """Returns True for a number that is refused; `check_numbers` refuses NaN in any case."""
    text: str
    """The end of the message that refuses a number."""


AT_LEAST_1 = Bound(lambda x: x < 1, "must be at least 1")
POSITIVE = Bound(lambda x: not 0 < x < math.inf, "must be positive and finite")
NOT_NEGATIVE = Bound(lambda x: not 0 <= x < math.inf, "must be finite and not negative")
FRACTION = Bound(lambda x: not 0 <= x <= 1, "must lie between 0 and 1")
DECAY = Bound(lambda x: not 0 <= x < 1 - 2**-24, "must be at least 0 and less than 1")  # nearer to 1 is 1 in float32


def rules(change: Change, *bounds: Bound, **of_fields: Change) -> dict[str, Any]:
    """The metadata of a field.

    Args:
      change: the consequence of a change. That of a section holds for those of its fields that declare none.
      bounds: each is checked on construction; None passes.
      of_fields: the consequence for single fields of a section whose class declares none.
    """
    return {"change": change, "bounds": bounds, "of_fields": of_fields}


def option(default: Any, change: Change, *bounds: Bound) -> Any:
    """A field with a default. See `rules`."""
    return dataclasses.field(default=default, metadata=rules(change, *bounds))


def check_options(config: Any, section: str = "") -> None:
    """Checks the numbers of a config class.

    Args:
      config: an instance.
      section: the beginning of its fields' names in messages: "data.".

    Raises:
      ValueError: a number breaks a bound of its field, or a device can't hold it.
    """
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        for bound in each.metadata.get("bounds", ()):
            if value is not None and bound.is_broken(value):
                raise ValueError(f"{section}{each.name}={value} {bound.text}")
    check_numbers(config, section)


def change_of(cls: type, name: str) -> Change | None:
    """The declared consequence of a change of a field.

    Args:
      cls: the config class.
      name: of the field, dotted: `section.field`.

    Returns:
      None: neither the field nor its section declares one.
    """
    own, _, rest = name.partition(".")
    metadata = next(each.metadata for each in dataclasses.fields(cls) if each.name == own)
    if not rest:
        return metadata.get("change")
    within = metadata.get("of_fields", {}).get(rest)
    section = get_type_hints(cls)[own]
    return within or change_of(section, rest) or metadata.get("change")
