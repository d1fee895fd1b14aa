"""Reads the sequences of a batch that one process needs.

All processes agree on which sequences a batch has, since that follows from the lengths of the documents and the seed.
Each reads the tokens of its own sequences.

Shapes: B sequences in a batch, b of them on this process, T tokens in a sequence, D documents in one, P segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int64, Shaped

from trainer.data.sequence_sharding import SequenceSharder


@dataclass(frozen=True)
class BatchShare:
    """The sequences of a batch that one process has read, and how long the documents of the whole batch are.

    Args:
        arrays: by name: what `PackedSequences` makes, and `token_order` (int32: the index in the
            sequence of each token) if sequences are sharded over devices.
        indices: of these sequences in the batch, rising.
        document_lengths: [B] lengths of the documents of every sequence, in tokens. The step's FLOPs follow from them.
            Trees have negative ones among them: see `FlopCounter.of_documents`.
        source: of a mixture's validation batch: the source of all its documents.
        documents: [B] the numbers of the documents in the segments of every sequence, in order.
    """

    arrays: dict[str, Shaped[np.ndarray, "b T"]]
    indices: tuple[int, ...]
    document_lengths: tuple[Int64[np.ndarray, " D"], ...]
    source: str | None = None
    documents: tuple[Int64[np.ndarray, " P"], ...] = ()

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.document_lengths)


class Sequences(Protocol):
    """Sequences by their numbers, for several threads, such as `PackedSequences`."""

    sequence_length: int

    def __getitem__(self, number: int) -> dict[str, Shaped[np.ndarray, " T"]]:
        """The arrays of one sequence."""

    def document_lengths(self, number: int) -> Int64[np.ndarray, " D"]:
        """The lengths of its documents, in order."""

    def document_numbers(self, number: int) -> Int64[np.ndarray, " P"]:
        """The numbers of the documents in its segments, in order."""

    def empty_sequence(self) -> dict[str, Shaped[np.ndarray, " T"]]:
        """The arrays of a sequence of padding."""


@dataclass(frozen=True)
class BatchReader:
    """Reads this process's sequences of any batch; several threads may.

    Args:
        sequences: what batches are made of.
        indices: in each batch, of the sequences to read; at least one.
        sharder: shards them over devices.
    """

    sequences: Sequences
    indices: tuple[int, ...]
    sharder: SequenceSharder

    @classmethod
    def of(
        cls, sequences: Sequences, batch_size: int, indices: Sequence[int] | None, sharder: SequenceSharder | None
    ) -> BatchReader:
        """A reader of all sequences without `indices`, which keeps their tokens in order without a sharder."""
        sharder = sharder or SequenceSharder("contiguous", sequences.sequence_length, 1, {}, keep_documents_apart=True)
        return cls(sequences, tuple(range(batch_size) if indices is None else indices), sharder)

    def __call__(self, numbers: Sequence[int | None]) -> BatchShare:
        """This process's share of a batch.

        Args:
            numbers: [B] of the sequences of the batch; None for one of padding.

        Raises:
            TrainingFailed: a file of tokens has changed since it was opened, or can't be read.
        """
        sharded = [self.sharder(self._sequence(numbers[index])) for index in self.indices]
        arrays = {name: np.stack([sequence[name] for sequence in sharded]) for name in sharded[0]}
        lengths, documents = (
            tuple(np.zeros(0, np.int64) if number is None else of_sequence(number) for number in numbers)
            for of_sequence in (self.sequences.document_lengths, self.sequences.document_numbers)
        )
        return BatchShare(arrays, self.indices, lengths, documents=documents)

    def _sequence(self, number: int | None) -> dict[str, Shaped[np.ndarray, " T"]]:
        return self.sequences.empty_sequence() if number is None else self.sequences[number]
