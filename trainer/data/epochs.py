"""The epochs of a corpus: in each, every packed sequence once, in an order of its own.

Where the sequence length changes within an epoch, the documents that are left of the epoch are packed anew. A document
that was read whole comes again in the next epoch only. One that is longer than a sequence may have been read in part,
here and there: its other pieces would be too short for longer sequences. So it is left as a whole or left out, and the
more of it was read, the likelier it is left out: of documents of which a third was read, every third one.

Everything follows from the documents, the seed and the place.

Shapes: D documents, P pieces of documents, T tokens in a sequence.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped

from trainer.data.documents import shuffled
from trainer.data.packing import PackedSequences
from trainer.data.tree_packing import pack


class EpochPlace(NamedTuple):
    """The place in the epochs of a corpus."""

    epoch: int = 0
    """Epochs that are over."""
    read: tuple[tuple[int, int], ...] = ()
    """Of the epoch after them: each sequence length in turn, with the sequences that were read, at least 1."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"epoch": self.epoch, "read": [[*each] for each in self.read]}

    @classmethod
    def from_json(cls, value: Any) -> EpochPlace:
        """Reads back what `to_json` made.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        epoch, read = value["epoch"], tuple((length, num_read) for length, num_read in value["read"])
        for count, least in ((epoch, 0), *((count, 1) for each in read for count in each)):
            if type(count) is not int or not least <= count < 2**62:
                raise ValueError(f"{str(count)[:40]!r} is no count of epochs, tokens or sequences")
        return cls(epoch, read)


class Epochs:
    """The packed sequences of all epochs by their numbers, for several threads. Number 0 is at a place.

    Args:
        sequences: those of a whole epoch.
        seed: of the orders.
        place: the place.

    Attributes:
        rest: the sequences of the epoch that the place is in, from the last change of the length on.

    Raises:
        ValueError: there is no such place.
    """

    def __init__(self, sequences: PackedSequences, seed: int, place: EpochPlace):
        self.sequence_length = sequence_length = sequences.sequence_length
        self._seed, self._epoch = seed, place.epoch
        is_same_length = bool(place.read) and place.read[-1][0] == sequence_length
        self._before = place.read[:-1] if is_same_length else place.read
        self._num_read = place.read[-1][1] if is_same_length else 0
        self._all = self.rest = sequences
        self._order_of = functools.lru_cache(maxsize=2)(self._make_order)
        documents, numbers = sequences.documents, np.arange(len(sequences.documents))
        for turn, (length, num_read) in enumerate(self._before):
            packed = pack(documents, length)
            read = shuffled(len(packed), seed, place.epoch, turn)[: _within(packed, num_read)]
            is_left = ~are_left_out(packed.shares_in(read))
            documents, numbers = documents.select(is_left), numbers[is_left]
        if self._before:
            self.rest = pack(documents, sequence_length)
        self._numbers = numbers  # of the documents of `rest`, among all
        _within(self.rest, self._num_read)

    def place(self, number: int) -> EpochPlace:
        """The place before a sequence."""
        epoch, index = self._find(number)
        before = self._before if epoch == self._epoch else ()
        return EpochPlace(epoch, (*before, (self.sequence_length, index)) if index else before)

    def __getitem__(self, number: int) -> dict[str, Shaped[np.ndarray, " T"]]:
        sequences, index = self._sequence(number)
        return sequences[index]

    def document_lengths(self, number: int) -> Int64[np.ndarray, " P"]:
        """The lengths of the pieces of one sequence, in order. No token is read for them."""
        sequences, index = self._sequence(number)
        return sequences.document_lengths(index)

    def document_numbers(self, number: int) -> Int64[np.ndarray, " P"]:
        """The numbers of the documents that the pieces of one sequence are of, in order."""
        sequences, index = self._sequence(number)
        documents = sequences.document_numbers(index)
        return self._numbers[documents] if sequences is self.rest else documents

    def empty_sequence(self) -> dict[str, Shaped[np.ndarray, " T"]]:
        """A sequence of padding."""
        return self._all.empty_sequence()

    def _find(self, number: int) -> tuple[int, int]:
        """The epoch of a sequence, and its index in the order from the epoch's last change of length on."""
        index = self._num_read + number
        if index < len(self.rest):
            return self._epoch, index
        num_epochs, index = divmod(index - len(self.rest), len(self._all))
        return self._epoch + 1 + num_epochs, index

    def _sequence(self, number: int) -> tuple[PackedSequences, int]:
        epoch, index = self._find(number)
        return self.rest if epoch == self._epoch else self._all, int(self._order_of(epoch)[index])

    def _make_order(self, epoch: int) -> Int64[np.ndarray, " sequences"]:
        if epoch == self._epoch:
            return shuffled(len(self.rest), self._seed, epoch, len(self._before))
        return shuffled(len(self._all), self._seed, epoch, 0)


def are_left_out(shares: Float64[np.ndarray, " D"]) -> Bool[np.ndarray, " D"]:
    """The documents that don't come again in an epoch of which some sequences were read.

    Args:
        shares: of each document that was read.

    Example:
        >>> are_left_out(np.array([1.0, 0.0, 0.5, 0.25, 0.25])).tolist()
        [True, False, True, False, False]
    """
    in_part = np.where(shares < 1, shares, 0.0)
    num_left_out = np.floor(np.cumsum(in_part) + 0.5)  # of those read in part, up to each: rounded, so exact in all
    return (shares == 1) | (np.diff(num_left_out, prepend=0.0) > 0)


def _within(sequences: PackedSequences, num_read: int) -> int:
    if num_read > len(sequences):
        raise ValueError(f"{num_read} sequences were read of {len(sequences)} of {sequences.sequence_length} tokens")
    return num_read
