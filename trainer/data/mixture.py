"""Draws documents from several sources by their shares of the tokens, and packs them into sequences.

A sequence is filled a piece of a document at a time. A source is behind by the tokens of its share that it has not been
drawn for yet. Of the sources that are not ahead, the one is drawn whose deadline is nearest: the number of tokens after
which it would be a whole sequence behind. This order is that of WF²Q (Bennett and Zhang 1996, "WF²Q: worst-case fair
weighted fair queueing", INFOCOM), and it keeps every source within one sequence's tokens of its share, after every
piece. (Drawing whatever is furthest behind doesn't: with ten sources, one falls 1.7 sequences behind.)

Of a source, the piece is taken that fits the room best, out of a few documents that wait. If none fits, another source
that is not ahead may fill the room, as long as all deadlines can still be met. If none of theirs fits, a document is
cut, unless it is a chat: then the room stays empty.

Everything follows from the seed, the sources and the place that the drawing begins at.

Shapes: D documents of a source, T tokens in a sequence.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from trainer.config import SourceConfig
from trainer.data.documents import shuffled, splitmix64
from trainer.data.packing import Piece
from trainer.errors import DataError, DataUsedUpError

LENGTHS = (0, 1024, 4096, 16_384, 65_536, 262_144)
"""The least tokens of the documents that are counted together."""
_NUM_WAITING, _FEWEST_WAITING = 64, 48  # several come at once: it takes longer to find them than to take them
# A gap of up to this part of a sequence is padded: it wastes less than a document loses that is cut for it, whose two
# parts are then read without each other. A larger gap costs more than a cut does.
_PADDED_PART = 128


class SourcePlace(NamedTuple):
    """The place in a source."""

    epoch: int = 0
    position: int = 0
    """In the order of the epoch: the documents before it are drawn, waiting or left out."""
    waiting: tuple[tuple[int, int], ...] = ()
    """Documents that are looked at next, each with its first target that is left."""
    tokens_by_length: tuple[int, ...] = (0,) * len(LENGTHS)
    """Targets drawn so far, by the length of their documents: see `LENGTHS`."""
    credit: int = 0
    """Targets drawn since the shares became what they are."""
    is_over: bool = False
    """It ran dry and has stopped."""

    @property
    def num_tokens(self) -> int:
        """Targets drawn so far."""
        return sum(self.tokens_by_length)


class MixturePlace(NamedTuple):
    """The place in a mixture: all that the next sequences depend on, beside the sources and the seed."""

    num_sequences: int = 0
    num_padding: int = 0
    """Positions without a target, in all sequences so far."""
    sources: Mapping[str, SourcePlace] = {}
    """By name. Sources that are no longer drawn from keep their places."""
    shares: tuple[int, Mapping[str, float]] = (0, {})
    """The sequence length and the weights that `credit` counts under."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        sources = {
            name: source._asdict()
            | {"waiting": [[*each] for each in source.waiting], "tokens_by_length": [*source.tokens_by_length]}
            for name, source in self.sources.items()
        }
        return self._asdict() | {"sources": sources, "shares": [self.shares[0], dict(self.shares[1])]}

    @classmethod
    def from_json(cls, value: Any) -> MixturePlace:
        """Reads back what `to_json` made.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        sources = {}
        for name, source in value["sources"].items():
            waiting = tuple((_count(document), _count(start)) for document, start in source["waiting"])
            tokens = tuple(map(_count, source["tokens_by_length"]))
            if len(tokens) != len(LENGTHS) or type(source["is_over"]) is not bool:
                raise ValueError(f"{str(source)[:40]} is no place in a source")
            counts = (_count(source["epoch"]), _count(source["position"]))
            sources[name] = SourcePlace(*counts, waiting, tokens, _count(source["credit"]), source["is_over"])
        length, weights = value["shares"]
        shares = (_count(length), {str(name): float(weight) for name, weight in weights.items()})
        return cls(_count(value["num_sequences"]), _count(value["num_padding"]), sources, shares)


_BEGINNING = MixturePlace()


class Mixture:
    """Plans the sequences of a mixture, one after another.

    Args:
        sources: the config's; those of weight 0 are left out.
        num_targets: by source: [D] targets in each of its documents.
        sequence_length: T.
        seed: of the orders.
        place: to begin at.
        on_progress: called with a line when a source runs dry for the first time.

    Raises:
        DataError: a source's weights by length leave none of its documents.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        num_targets: Mapping[str, Int64[np.ndarray, " D"]],
        *,
        sequence_length: int,
        seed: int,
        place: MixturePlace = _BEGINNING,
        on_progress: Callable[[str], None] = lambda line: None,
    ):
        self._length, self._on_progress = sequence_length, on_progress
        self._num_sequences, self._num_padding = place.num_sequences, place.num_padding
        # In a phase or an attempt with other sources, those that are left out keep their places.
        self._places = dict(place.sources)
        firsts = dict(zip(num_targets, np.cumsum([0, *map(len, num_targets.values())]).tolist(), strict=False))
        weights = {source.name: source.weight for source in sources if source.weight > 0}
        self._sources = [
            _Source(source, num_targets[source.name], firsts[source.name], seed, place.sources.get(source.name))
            for source in sources
            if source.name in weights
        ]
        self._shares = (sequence_length, weights)
        was_over = {name for name in weights if name in place.sources and place.sources[name].is_over}
        is_over = {source.config.name for source in self._sources if source.is_over}
        is_as_before = self._shares == (place.shares[0], dict(place.shares[1])) and is_over == was_over
        self._share_anew(keep_credit=is_as_before)

    def place(self) -> MixturePlace:
        """The place behind the sequences planned so far."""
        drawn = {source.config.name: source.place() for source in self._sources}
        return MixturePlace(self._num_sequences, self._num_padding, self._places | drawn, self._shares)

    def plan_sequence(self) -> list[Piece]:
        """The pieces of the next sequence, of documents numbered through all sources.

        Raises:
            DataUsedUpError: every source has stopped.
        """
        pieces: list[Piece] = []
        room = self._length
        while room and (choice := self._choose(room)) is not None:
            source, index, length = choice
            pieces.append(source.take(index, length))
            room -= length
        if not pieces:
            names = ", ".join(source.config.name for source in self._sources)
            raise DataUsedUpError(
                f"all documents of data.sources ({names}) are used up after {self._num_sequences:,} sequences; resume "
                "with when_exhausted='repeat' in one of them, or with more documents (--data.allow-changed True)"
            )
        self._num_sequences, self._num_padding = self._num_sequences + 1, self._num_padding + room
        return pieces

    def _choose(self, room: int) -> tuple[_Source, int, int] | None:
        """The source, which of its waiting documents, and how many targets of it; None: the room stays empty."""
        for source in self._sources:
            if not source.is_over and not source.fill():
                self._run_dry(source)
        active = [source for source in self._sources if not source.is_over]
        if not active:
            return None
        total = sum(source.credit for source in active)
        # In 1/W of a token, where W is the sum of the weights, so that all of it is exact.
        behind = {source: source.share * total - self._sum * source.credit for source in active}
        by_deadline = sorted(active, key=lambda source: self._tokens_to_deadline(source, behind[source]))
        not_ahead = [source for source in by_deadline if behind[source] >= 0]
        for source in not_ahead:
            index = source.best_fit(room, self._length)
            if index is None:
                continue
            length = min(source.left(index), room)
            if source is not_ahead[0] or self._meets_deadlines(behind, source, length):
                return source, index, length
        if room <= self._length // _PADDED_PART or not_ahead[0].is_whole:
            return None
        return not_ahead[0], not_ahead[0].longest(), room

    def _tokens_to_deadline(self, source: _Source, behind: int) -> Fraction:
        """Tokens after which a source that isn't drawn from is a sequence behind."""
        return Fraction(self._length * self._sum - behind, source.share)

    def _meets_deadlines(self, behind: Mapping[_Source, int], drawn: _Source, length: int) -> bool:
        """True if all sources can be drawn before their deadlines after a piece of one of them.

        By the demand of jobs up to each deadline: the sources that have it by then are to be drawn for what they are
        behind and for their shares of the tokens up to it, less the sequence that each may be behind.
        """
        after = {source: each + source.share * length for source, each in behind.items()}
        after[drawn] -= self._sum * length
        demand, shares = 0, 0
        for source in sorted(after, key=lambda source: self._tokens_to_deadline(source, after[source])):
            demand, shares = demand + after[source], shares + source.share
            rest = (self._sum - shares) * (self._length * self._sum - after[source])
            if demand * source.share - rest > self._length * self._sum * source.share:
                return False
        return True

    def _run_dry(self, source: _Source) -> None:
        """Begins the next epoch of a source, or stops it."""
        name, repeats = source.config.name, source.config.when_exhausted == "repeat"
        if source.epoch == 0:
            then = "its documents come again, in another order" if repeats else "its weight goes to the others"
            self._on_progress(f"data.sources: {name!r} has run dry at sequence {self._num_sequences + 1:,}: {then}")
        if repeats:
            source.begin_epoch(source.epoch + 1)
            source.fill()  # there always is one: those of the largest weight come in every epoch
        else:
            source.is_over = True
            self._share_anew(keep_credit=False)

    def _share_anew(self, *, keep_credit: bool) -> None:
        """Divides the tokens from here on among the sources that haven't stopped, by their weights."""
        active = [source for source in self._sources if not source.is_over]
        weights = [Fraction(source.config.weight) for source in active]
        scale = math.lcm(*(weight.denominator for weight in weights))
        for source, weight in zip(active, weights, strict=True):
            source.share = int(weight * scale)
        self._sum = sum(source.share for source in active)
        if not keep_credit:
            for source in self._sources:
                source.credit = 0


class _Source:
    """A source that is drawn from.

    Args:
        config: the source's.
        num_targets: [D] of its documents.
        first: number of its first document among those of all sources.
        seed: of its orders.
        place: to begin at; None: at the beginning.
    """

    def __init__(
        self,
        config: SourceConfig,
        num_targets: Int64[np.ndarray, " D"],
        first: int,
        seed: int,
        place: SourcePlace | None,
    ):
        place = place or SourcePlace()
        self.config, self._num_targets, self._first, self._seed = config, num_targets, first, seed
        self._rates = _rates(config, num_targets)
        self.epoch, self._position, self.credit = place.epoch, place.position, place.credit
        self._tokens_by_length = list(place.tokens_by_length)
        if place.position > len(num_targets) or any(
            document >= len(num_targets) or start >= max(num_targets[document], 1) for document, start in place.waiting
        ):
            raise ValueError(f"the place in {config.name!r} is past its {len(num_targets)} documents")
        self._waiting = [each for each in place.waiting if self._rates[each[0]] > 0]
        self._lefts = [num_targets.item(document) - start for document, start in self._waiting]
        self.is_over = place.is_over and config.when_exhausted == "stop"
        self.is_whole = config.format == "chats"  # what lies after a cut would lack the turns before it
        self.share = 0
        self._order: tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]] | None = None  # made when first needed
        if place.is_over and not self.is_over:
            self.begin_epoch(place.epoch + 1)

    def place(self) -> SourcePlace:
        """The place behind what was taken so far."""
        tokens, waiting = tuple(self._tokens_by_length), tuple(self._waiting)
        return SourcePlace(self.epoch, self._position, waiting, tokens, self.credit, self.is_over)

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the first document of an epoch."""
        self.epoch, self._position, self._order = epoch, 0, None

    def fill(self) -> bool:
        """Has as many documents wait as may, of this epoch alone; False if none is left."""
        if len(self._waiting) < _FEWEST_WAITING:
            order, ranks = self._order or self._make_order()
            first = int(np.searchsorted(ranks, self._position))
            added = order[first : first + _NUM_WAITING - len(self._waiting)].tolist()
            if added:
                self._waiting += [(document, 0) for document in added]
                self._lefts += self._num_targets[added].tolist()
                self._position = int(ranks[first + len(added) - 1]) + 1
        return bool(self._waiting)

    def best_fit(self, room: int, sequence_length: int) -> int | None:
        """The waiting document whose next piece leaves the least room; None: none fits.

        An empty sequence begins with the first document that fills it, or else with the first one: whatever waits
        longest. So no document waits for ever for a gap of its size.
        """
        if room == sequence_length:
            return next((index for index, left in enumerate(self._lefts) if left >= room), 0)
        fitting = [left for left in self._lefts if left <= room]
        return self._lefts.index(max(fitting)) if fitting else None

    def longest(self) -> int:
        """The waiting document with the most targets left: that of the fewest cuts for its length."""
        return self._lefts.index(max(self._lefts))

    def left(self, index: int) -> int:
        """Targets left of a waiting document."""
        return self._lefts[index]

    def take(self, index: int, length: int) -> Piece:
        """Takes the next targets of a waiting document."""
        document, start = self._waiting[index]
        self._lefts[index] -= length
        self._waiting[index] = (document, start + length)
        if not self._lefts[index]:
            del self._lefts[index], self._waiting[index]
        self.credit += length
        self._tokens_by_length[bisect.bisect_right(LENGTHS, self._num_targets.item(document)) - 1] += length
        return Piece(self._first + document, start, length)

    def _make_order(self) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """The documents of this epoch, in order, and the rank of each among all documents."""
        order = shuffled(len(self._num_targets), self._seed, self.config.name, self.epoch)
        # All documents are ranked alike whatever is left out, so that a place outlives other weights.
        ranks = np.flatnonzero(self._are_drawn()[order])
        self._order = order[ranks], ranks
        return self._order

    def _are_drawn(self) -> Bool[np.ndarray, " D"]:
        """The documents that come in this epoch: one of a third of the largest weight in every third epoch."""
        documents = splitmix64(np.arange(len(self._num_targets), dtype=np.uint64))
        # Of few bits, so that the sums are exact where the rate is 1.
        offsets = (documents >> np.uint64(40)).astype(np.float64) / 2**24
        return np.floor((self.epoch + 1) * self._rates + offsets) > np.floor(self.epoch * self._rates + offsets)


def _rates(source: SourceConfig, num_targets: Int64[np.ndarray, " D"]) -> Float64[np.ndarray, " D"]:
    """[D] Times that each document is drawn in an epoch: 1 for those of the largest weight, less for others."""
    least = np.array([each.min_tokens for each in source.length_weights], np.int64)
    weights = np.array([1.0, *(each.weight for each in source.length_weights)])
    rates = weights[np.searchsorted(least, num_targets, side="right")] * (num_targets > 0)
    if not num_targets.any():
        raise DataError(f"data.sources {source.name!r}: no turn of any chat ends within a sequence; make these longer")
    if not rates.any():
        raise DataError(
            f"data.sources {source.name!r}: length_weights leave none of its {len(num_targets):,} training documents, "
            f"the longest of {int(num_targets.max(initial=0)):,} tokens; give one of these lengths a weight"
        )
    return rates / rates.max()


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value
