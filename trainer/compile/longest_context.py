"""Searches for the longest context with which a training step fits in the devices' memory.

From the config's own length it goes by powers of two to the first that doesn't fit, then by bisection in eighths of the
last that does. First the config is taken as it is. From there on, a length that doesn't fit is tried with the changes
of `fit_search.py`, one field at a time, the least harmful first. A change with which it fits is kept for the lengths
above.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer.compile.fit_search import Changes, OutOfTime, Remedy, Try, search_remedy
from trainer.compile.step_profile import StepProfile
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed, UserMistake

# Of the lengths that are tried. Positions are int32.
_SHORTEST, _LONGEST = 128, 2**30


@dataclass
class Bounds:
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

    as_is: Bounds
    """With nothing but the length changed."""
    changed: Bounds
    """With other changes, too, where a longer one then fits; otherwise the same."""
    tries: tuple[Try, ...]
    """In the order of trying."""
    is_complete: bool
    """False: the time ran out."""


def search_longest_context(
    config: TrainConfig,
    profile: StepProfile,
    compile_with: Callable[[Changes], StepProfile],
    *,
    seconds: float,
    on_try: Callable[[Try], None],
) -> LongestContext:
    """Looks for the longest context.

    Args:
      config: the experiment.
      profile: of its step as it is.
      compile_with: compiles the config with changes, `sequence_length` among them.
      seconds: no compilation begins after these.
      on_try: called with each try.
    """
    search = _Search(config, profile, compile_with, time.monotonic() + seconds, on_try)
    as_is, changed, is_complete = Bounds(), Bounds(), True
    try:
        as_is.narrow(search.as_is, config.sequence_length)
        changed = Bounds(as_is.tokens, as_is.attempt)
        if as_is.too_long is not None:
            changed.narrow(search.changed, config.sequence_length if as_is.tokens is None else as_is.too_long)
    except OutOfTime:
        is_complete = False
    if changed.tokens is None:
        changed = as_is
    return LongestContext(as_is, changed, tuple(search.tries.values()), is_complete)


class _Search:
    """Compiles each length once with the same changes, and keeps changes that made one fit."""

    def __init__(
        self,
        config: TrainConfig,
        profile: StepProfile,
        compile_with: Callable[[Changes], StepProfile],
        deadline: float,
        on_try: Callable[[Try], None],
    ):
        self._config, self._profile, self._compile_with = config, profile, compile_with
        self._deadline, self._on_try = deadline, on_try
        self._kept = Changes()
        own = Changes((Remedy("sequence_length", config.sequence_length),))
        self.tries = {own: Try(own, profile)}

    def as_is(self, length: int) -> Try:
        """With nothing but the length changed."""
        return self._attempt(Changes((Remedy("sequence_length", length),)))

    def changed(self, length: int) -> Try:
        """With what was kept and, if that doesn't do, one field more."""
        changes = Changes((Remedy("sequence_length", length), *self._kept.remedies))
        tried = self._attempt(changes)
        if tried.fits or tried.profile is None:
            return tried

        def compile_also(remedy: Remedy) -> StepProfile:
            also = self._attempt(changes.also(remedy))
            if also.profile is None:
                raise TrainingFailed(also.problem or "")
            return also.profile

        search = search_remedy(
            changes.apply(self._config),
            self._profile.num_devices,
            compile_also,
            seconds=self._deadline - time.monotonic(),
            can_offload=self._profile.platform != "cpu",
            on_try=lambda _: None,
        )
        if search.found is not None and isinstance(remedy := search.found.change, Remedy):
            self._kept = self._kept.also(remedy)
            return self._attempt(changes.also(remedy))
        if not search.is_complete:
            raise OutOfTime
        return tried

    def _attempt(self, changes: Changes) -> Try:
        if changes not in self.tries:
            if time.monotonic() >= self._deadline:
                raise OutOfTime
            try:
                self.tries[changes] = Try(changes, self._compile_with(changes))
            except (UserMistake, TrainingFailed) as error:
                self.tries[changes] = Try(changes, None, str(error))
            self._on_try(self.tries[changes])
        return self.tries[changes]
