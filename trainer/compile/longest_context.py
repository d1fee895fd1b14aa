"""Searches for the longest context with which a training step fits in the devices' memory.

From the config's own length it goes by powers of two to the first that doesn't fit, then by bisection in eighths of the
last that does. First the config is taken as it is. From there on, a length that doesn't fit is tried with the changes
of `fit_search.py`, one field at a time, the least harmful first. A change with which it fits is kept for the lengths
above.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from trainer.compile.changes import Changes
from trainer.compile.fit_search import OutOfTime, Search, Try
from trainer.compile.step_profile import StepProfile

# Of the lengths that are tried. Positions are int32.
_SHORTEST, _LONGEST = 128, 2**30


@dataclass
class LengthBounds:
    """Bounds of the longest context that fits."""

    tokens: int | None = None
    """The longest that is known to fit; None: none is."""
    attempt: Try | None = None
    """With which it does."""
    too_long: int | None = None
    """The shortest above that is known not to fit; None: none is."""

    def narrow(self, attempt: Callable[[int], Try], length: int) -> None:
        """Goes by powers of two, up until one doesn't fit, or down until one does, and bisects."""
        while self.too_long is None and length <= _LONGEST:
            self._note(length, attempt(length))
            length = 2 ** length.bit_length()
        while self.tokens is None and self.too_long is not None and self.too_long > _SHORTEST:
            shorter = 2 ** ((self.too_long - 1).bit_length() - 1)
            self._note(shorter, attempt(shorter))
        while (middle := self._middle()) is not None:
            self._note(middle, attempt(middle))

    def _note(self, length: int, tried: Try) -> None:
        if tried.fits:
            self.tokens, self.attempt = length, tried
        else:
            self.too_long = length

    def _middle(self) -> int | None:
        """A length between; None: there is none."""
        if self.tokens is None or self.too_long is None:
            return None
        middle = (self.tokens + self.too_long) // 2
        unit = 2 ** (middle.bit_length() - 1) // 8  # meshes divide its multiples
        middle = middle // unit * unit
        return middle if self.tokens < middle < self.too_long else None


@dataclass(frozen=True)
class LongestContext:
    """The result of a search."""

    as_is: LengthBounds
    """With nothing but the length changed."""
    changed: LengthBounds
    """With other changes, too, where a longer one then fits; otherwise the same."""


def search_longest_context(search: Search, profile: StepProfile) -> LongestContext:
    """Looks for the longest context.

    Args:
      search: compiles the config with changes, `sequence_length` among them.
      profile: of its step as it is.
    """
    own, kept = search.config.sequence_length, search.base

    def of_length(length: int) -> Changes:
        return search.base.also("sequence_length", length)

    search.tries[of_length(own)] = Try(of_length(own), profile)

    def with_changes(length: int) -> Try:
        """With what was kept and, if that doesn't do, one field more."""
        nonlocal kept
        tried = search.attempt(dataclasses.replace(kept, values=(*of_length(length).values, *kept.values)))
        if tried.fits or tried.profile is None:
            return tried
        found = search.least_harmful(tried.changes)
        if found is None:
            return tried
        _, *others = found.changes.values
        kept = dataclasses.replace(kept, values=tuple(others))
        return found

    as_is, changed = LengthBounds(), LengthBounds()
    with contextlib.suppress(OutOfTime):
        as_is.narrow(lambda length: search.attempt(of_length(length)), own)
        changed = LengthBounds(as_is.tokens, as_is.attempt)
        if as_is.too_long is not None:
            changed.narrow(with_changes, own if as_is.tokens is None else as_is.too_long)
    return LongestContext(as_is, as_is if changed.tokens is None else changed)
