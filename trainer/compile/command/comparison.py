"""`--compare FIELD=A,B,C`: a training step, compiled with each of some values of a config field, or of each page."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.config.file import flag_types
from trainer.config.suggestions import did_you_mean_field
from trainer.config.words import split_at_commas
from trainer.errors import UserMistake

# What stands in a field's place where config pages are compared.
_PAGES = "config"


@dataclass(frozen=True)
class Comparison:
    """The values of a field, or the pages, in the order in which the table lists them."""

    field: str
    values: tuple[str, ...]
    """As written."""

    def arguments(self, value: str) -> tuple[str, str]:
        """The override, as on a command line."""
        return f"--{self.field.replace('_', '-')}", value

    @property
    def compares_pages(self) -> bool:
        """True: the variants are config pages."""
        return self.field == _PAGES

    @staticmethod
    def parse(text: str) -> Comparison:
        """Reads `FIELD=A,B,C`; commas inside parentheses belong to a value.

        Raises:
          UserMistake: no such field, or fewer than two values.

        >>> comparison = Comparison.parse("model.masks=CausalMask(),CausalMask() & LocalMask(1023, 0)")
        >>> comparison.values
        ('CausalMask()', 'CausalMask() & LocalMask(1023, 0)')
        >>> comparison.arguments("CausalMask()")
        ('--model.masks', 'CausalMask()')
        >>> Comparison.parse("config=base,window:left=511,right=0").values
        ('base', 'window:left=511,right=0')
        """
        field, _, listed = text.partition("=")
        field = field.replace("-", "_")
        values = split_at_commas(listed)
        if field == _PAGES:
            values = _rejoin_page_arguments(values)
        if len(values) < 2 or not all(values):
            raise UserMistake(
                f"--compare {text}: expected a field and two or more values, such as model.remat=none,full"
            )
        if field not in (_PAGES, *flag_types()):
            near = did_you_mean_field(field, [_PAGES, *flag_types()])
            raise UserMistake(f"--compare {text}: the config has no field {field}{near}")
        return Comparison(field, tuple(values))


def _rejoin_page_arguments(parts: list[str]) -> list[str]:
    """Gives `name=value` back to the page before it, whose arguments have commas between them, too."""
    pages: list[str] = []
    for part in parts:
        if pages and re.match(r"\w+=", part):
            pages[-1] += f",{part}"
        else:
            pages.append(part)
    return pages
