"""The sources of a mixture: named corpora that a run draws from, each by its share of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SourceFormat = Literal["stdlib", "text", "jsonl", "parquet", "bin", "trees", "chats"]


@dataclass(frozen=True)
class LengthWeight:
    """A weight by which documents of a length are drawn."""

    min_tokens: int
    """Tokens of the shortest document that it is for, up to those of the next one."""
    weight: float
    """Relative to those of the source's other lengths; 0 leaves the documents out."""


@dataclass(frozen=True)
class SourceConfig:
    """A source of a mixture."""

    name: str
    """Short name, in logs and in the run's record. Its documents come in an order that follows from it."""
    files: tuple[str, ...] = ()
    """Globs (`**` allowed) of its files; none for the format stdlib."""
    format: SourceFormat = "text"
    """As `DataConfig.source`, but for trees."""
    text_field: str = "text"
    """As `DataConfig.text_field`."""
    weight: float = 1.0
    """Its share of the tokens, relative to the other sources' weights; 0 leaves it out."""
    length_weights: tuple[LengthWeight, ...] = ()
    """Weights of its documents by their length in tokens, shortest first. A document shorter than the first of them has
    weight 1. A document of weight 4 is drawn four times while one of weight 1 is drawn once."""
    when_exhausted: Literal["repeat", "stop"] = "repeat"
    """repeat: begin again, in another order. stop: its weight goes to the sources that are left."""

    def __post_init__(self):
        place = f"data.sources {self.name!r}: "
        if not self.name or not self.name.isprintable() or "/" in self.name:
            raise ValueError(f"{place}name={self.name!r} must be printable, without /, and not empty")
        if (self.format == "stdlib") == bool(self.files):
            has = "reads no files, but files" if self.files else "needs files, one or more globs; files"
            raise ValueError(f"{place}format={self.format!r} {has}={self.files}")
        if self.format == "trees":
            raise ValueError(
                f"{place}format='trees' isn't drawn in a mixture, whose documents may be cut anywhere; set "
                "data.source to trees, and data.files to its files"
            )
        _check_weight(place, self.weight)
        for each in self.length_weights:
            _check_weight(f"{place}length_weights: ", each.weight)
        lengths = [each.min_tokens for each in self.length_weights]
        if any(length < 0 for length in lengths) or sorted(set(lengths)) != lengths:
            raise ValueError(f"{place}length_weights must rise from 0 or more tokens, got min_tokens {lengths}")


def check_sources(sources: Sequence[SourceConfig]) -> None:
    """Checks the sources of one mixture against each other.

    Raises:
      ValueError: two have one name, or the weights sum to nothing.
    """
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"data.sources has {names.count(twice)} sources named {twice!r}; give each its own name")
    if sources and not any(source.weight for source in sources):
        raise ValueError(f"data.sources: the weights of {', '.join(names)} are all 0; make one of them positive")


def check_sources_of_run(sources: Sequence[SourceConfig], of_run: Sequence[SourceConfig]) -> None:
    """Checks that the sources of a phase are the run's, whose files are opened when the run starts.

    Raises:
      ValueError: a source isn't the run's, or reads other files.
    """
    known = {source.name: source for source in of_run}
    for source in sources:
        if source.name not in known:
            raise ValueError(
                f"sources: {source.name!r} is not one of data.sources ({', '.join(known) or 'none'}); name it there, "
                "with weight 0 if it isn't drawn from at first"
            )
        for name in ("files", "format", "text_field"):
            ours, theirs = getattr(source, name), getattr(known[source.name], name)
            if ours != theirs:
                raise ValueError(
                    f"sources {source.name!r}: {name}={ours!r} is {theirs!r} in data.sources; use the same"
                )


def _check_weight(place: str, weight: float) -> None:
    if not 0 <= weight < math.inf:
        raise ValueError(f"{place}weight={weight} must be finite and not negative")
