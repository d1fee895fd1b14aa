"""Packs documents into sequences. The plan depends on lengths alone; sequences are built on demand.

A document is cut only if it is longer than a sequence: into full sequences and a remainder. The pieces are packed by
best-fit decreasing: the longest first, each into the sequence with the least room that still holds it
(Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830). Attention never crosses a
document and positions start over in each piece, so which documents share a sequence changes no prediction, and one
plan serves every epoch; the order of the sequences is what an epoch shuffles.

Shapes: D documents, P pieces, S sequences, T tokens in a sequence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from trainer.data.documents import Documents
from trainer.errors import DataError


class Piece(NamedTuple):
    """Part of a document, counted in targets."""

    document: int
    start: int
    """First target within the document."""
    length: int


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that each fit a sequence, counted in targets.

    Args:
        document: [P] which document.
        start: [P] first target within the document.
        length: [P] number of targets.
    """

    document: Int64[np.ndarray, " P"]
    start: Int64[np.ndarray, " P"]
    length: Int64[np.ndarray, " P"]


def cut_documents(num_targets: Int64[np.ndarray, " D"], sequence_length: int) -> Pieces:
    """Cuts documents that are longer than a sequence, and leaves the others whole.

    Args:
        num_targets: [D] targets in each document.
        sequence_length: targets that fit a sequence.
    """
    num_pieces = -(-num_targets // sequence_length)
    document = np.repeat(np.arange(len(num_targets)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    start = (np.arange(len(document)) - first_piece[document]) * sequence_length
    return Pieces(document, start, np.minimum(num_targets[document] - start, sequence_length))


def pack_best_fit(lengths: Int64[np.ndarray, " P"], capacity: int) -> Int64[np.ndarray, " P"]:
    """Best-fit decreasing bin packing.

    All pieces of one length are placed together: a sequence that is the tightest fit for one of them stays the
    tightest until it has no room for another. So the time grows with the number of distinct lengths.

    Args:
        lengths: [P] each at least 1 and at most `capacity`.
        capacity: room in a sequence.

    Returns:
        [P] the sequence that each piece goes to; sequences are numbered from 0 without gaps.

    Example:
        >>> pack_best_fit(np.array([3, 5, 2, 4]), capacity=7).tolist()
        [1, 0, 0, 1]
    """
    sequence_of = np.empty(len(lengths), np.int64)
    num_sequences = 0
    rooms: list[int] = []  # Sorted: the rooms for which there are sequences in `sequences_with`.
    sequences_with: dict[int, list[np.ndarray]] = defaultdict(list)

    def put_back(room: int, sequences: np.ndarray) -> None:
        if room and len(sequences):
            if not sequences_with[room]:
                insort(rooms, room)
            sequences_with[room].append(sequences)

    by_length = np.argsort(-lengths, kind="stable")
    for pieces in np.split(by_length, np.flatnonzero(np.diff(lengths[by_length])) + 1) if len(lengths) else ():
        length = int(lengths[pieces[0]])
        while len(pieces):
            tightest = bisect_left(rooms, length)
            if tightest < len(rooms):
                room = rooms[tightest]
                sequences = sequences_with[room].pop()
                if not sequences_with[room]:
                    rooms.pop(tightest)
            else:
                room = capacity
                sequences = np.arange(num_sequences, num_sequences - -len(pieces) // (capacity // length))
                num_sequences += len(sequences)
            each = room // length
            used = sequences[: -(-len(pieces) // each)]
            placed = pieces[: len(used) * each]
            sequence_of[placed] = np.repeat(used, each)[: len(placed)]
            in_last = len(placed) - (len(used) - 1) * each
            put_back(room, sequences[len(used) :])
            put_back(room - each * length, used[:-1])
            put_back(room - in_last * length, used[-1:])
            pieces = pieces[len(placed) :]
    return sequence_of


class PackedSequences:
    """Random access to the packed sequences of some documents.

    Each item is one sequence of a batch: arrays [T] `tokens` and `targets` (int32), `weights` of the targets' losses
    (float32; 1, and 0 on padding), `segment_ids` (int32; pieces count down to 1, padding is 0) and `positions` (int32,
    from 0 in each piece).

    Args:
        documents: what to pack.
        sequence_length: T.
        group_sizes: numbers of documents that lie behind each other in groups; no sequence holds documents of two.
            None: they are one group.

    Attributes:
        num_sequences: of each group, in order.
    """

    def __init__(self, documents: Documents, sequence_length: int, group_sizes: Sequence[int] | None = None):
        self.documents = documents
        self.sequence_length = sequence_length
        self.pieces = self._cut()
        ends = np.cumsum([len(documents)] if group_sizes is None else group_sizes)
        groups = np.split(self.pieces.length, np.searchsorted(self.pieces.document, ends[:-1]))
        packed = [pack_best_fit(lengths, sequence_length) for lengths in groups]
        self.num_sequences = [int(sequence_of.max(initial=-1)) + 1 for sequence_of in packed]
        firsts = np.cumsum([0, *self.num_sequences])
        sequence_of = np.concatenate([first + each for first, each in zip(firsts, packed, strict=False)])
        self._pieces_by_sequence = np.argsort(sequence_of, kind="stable")
        self._ends = np.cumsum(np.bincount(sequence_of))

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def padding_fraction(self) -> float:
        """Share of all positions that holds no target."""
        return 1 - int(self.pieces.length.sum()) / (len(self) * self.sequence_length)

    def document_lengths(self, index: int) -> Int64[np.ndarray, " P"]:
        """The lengths of the pieces of one sequence, in order. No token is read for them."""
        return self.pieces.length[self.pieces_of(index)]

    def document_numbers(self, index: int) -> Int64[np.ndarray, " P"]:
        """The numbers of the documents that the pieces of one sequence are of, in order."""
        return self.pieces.document[self.pieces_of(index)]

    def shares_in(self, sequences: Int64[np.ndarray, " N"]) -> Float64[np.ndarray, " D"]:
        """The share of each document that some sequences hold: 0.0 to 1.0, and 0.0 of one without targets."""
        are_in = np.zeros(len(self), bool)
        are_in[sequences] = True
        pieces = self._pieces_by_sequence[np.repeat(are_in, np.diff(self._ends, prepend=0))]
        in_these, in_all = (
            np.bincount(self.pieces.document[each], self.pieces.length[each], len(self.documents))
            for each in (pieces, slice(None))
        )
        return in_these / np.maximum(in_all, 1)

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, " T"]]:
        columns = (self.pieces.document, self.pieces.start, self.pieces.length)
        pieces = self.pieces_of(index)
        return fill_sequence(
            self.documents,
            [Piece(*row) for row in zip(*(column[pieces].tolist() for column in columns), strict=True)],
            self.sequence_length,
        )

    def pieces_of(self, index: int) -> Int64[np.ndarray, " P"]:
        """The numbers of the pieces of one sequence, in order."""
        first = self._ends[index - 1] if index else 0
        return self._pieces_by_sequence[first : self._ends[index]]

    def empty_sequence(self) -> dict[str, Shaped[np.ndarray, " T"]]:
        """A sequence of padding."""
        return empty_sequence(self.sequence_length)

    def sharing(self) -> dict[str, int] | None:
        """The tokens that trees save, ready for JSON; None: the documents share none."""
        return None

    def _cut(self) -> Pieces:
        return cut_documents(self.documents.within(self.sequence_length).num_targets, self.sequence_length)


def check_lengths(documents: Documents, sequence_length: int) -> None:
    """Refuses documents that sequences of a length can't hold.

    Raises:
        DataError: as `Documents.within`, or no turn of a chat fits a sequence.
    """
    if not documents.within(sequence_length).num_tokens:
        raise DataError(f"no turn of any chat ends within sequence_length={sequence_length:,}; raise it")


def empty_sequence(sequence_length: int) -> dict[str, Shaped[np.ndarray, " T"]]:
    """A sequence of padding."""
    return {
        "tokens": np.zeros(sequence_length, np.int32),
        "targets": np.zeros(sequence_length, np.int32),
        "weights": np.zeros(sequence_length, np.float32),
        "segment_ids": np.zeros(sequence_length, np.int32),
        "positions": np.zeros(sequence_length, np.int32),
    }


def fill_sequence(
    documents: Documents, pieces: Sequence[Piece], sequence_length: int
) -> dict[str, Shaped[np.ndarray, " T"]]:
    """A sequence of some pieces, in order, and then padding: the arrays that `PackedSequences` describes."""
    sequence = empty_sequence(sequence_length)
    streams = documents.streams([(document, start, start + length + 1) for document, start, length in pieces])
    offset = 0
    for number, (document, start, length) in enumerate(pieces):
        place = slice(offset, offset + length)
        # A stream is one token longer than its piece has targets.
        stream = streams[offset + number : offset + number + length + 1]
        sequence["tokens"][place], sequence["targets"][place] = stream[:-1], stream[1:]
        sequence["weights"][place] = documents.weights(document, start, length)
        # Ranks compare the lowest and the highest ids of their blocks, to know whose keys they need. Ids that only
        # fall, to the padding's, make these ranges narrow.
        sequence["segment_ids"][place] = len(pieces) - number
        sequence["positions"][place] = np.arange(length)
        offset += length
    return sequence
