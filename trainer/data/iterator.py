"""Batches of packed sequences: an endless resumable stream for training, a fixed list for validation."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.data.corpora import Corpus
from trainer.data.errors import DataError
from trainer.data.packing import Batch, PackedSequences, empty_row
from trainer.errors import UserMistake

_MAX_READ_THREADS = 8


class TrainIterator:
    """Endless batches of training sequences; made by `make_train_iterator`.

    Every epoch visits every sequence once, in an order of its own; a batch may span two epochs. Batches are
    prepared ahead by threads, and `get_state` speaks of the batches handed out, not of those prepared.

    Attributes:
        num_sequences: sequences in an epoch.
        padding_fraction: share of an epoch's positions that holds no target.
    """

    def __init__(self, sequences: PackedSequences, grain_iterator: Any, stream: dict[str, Any], tokenizer: str):
        self.num_sequences = len(sequences)
        self.padding_fraction = sequences.padding_fraction
        self._grain_iterator = grain_iterator
        self._stream = stream
        self._tokenizer = tokenizer

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._grain_iterator)

    def get_state(self) -> dict[str, Any]:
        """The place in the stream, ready for JSON; a few hundred bytes, the same on every process.

        It also holds the tokenizer's identity, for whoever reads a checkpoint to know what its ids mean.
        """
        return {
            "stream": dict(self._stream),
            "tokenizer": self._tokenizer,
            "grain": self._grain_iterator.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to the place that `get_state` told of; what follows is what followed there, bit for bit.

        Takes the same short time wherever the place is.

        Raises:
            DataError: the state is of another stream; names what differs.
        """
        for name, mine in self._stream.items():
            theirs = state["stream"].get(name)
            if theirs != mine:
                raise DataError(
                    f"the saved data state has {name}={theirs!r} but this run has {mine!r}: a place in another "
                    f"stream; go back to the {name} that the checkpoint was made with, or start in a new workdir"
                )
        self._grain_iterator.set_state(state["grain"])

    def close(self) -> None:
        """Stop the threads that prepare batches; the iterator is of no use afterwards."""
        self._grain_iterator.close()


def make_train_iterator(
    corpus: Corpus,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    num_prefetch_batches: int,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainIterator:
    """Shuffle, shard, batch and prefetch the training split, with grain.

    Args:
        corpus: the corpus.
        sequence_length: tokens in a sequence.
        batch_size: sequences in a batch, over all processes; each process gets `batch_size / process_count` of them.
            The union of the processes' batches does not depend on their count.
        seed: of the order; at least 0.
        num_prefetch_batches: batches prepared ahead.
        process_index: which share of each batch.
        process_count: shares that each batch is split into.

    Raises:
        DataError: the documents don't fill one batch.
        UserMistake: the batch can't be shared equally, or the seed is negative.
    """
    # Here, because grain imports JAX and orbax (2 s), and data must be checked without them.
    import grain

    if batch_size % process_count:
        raise UserMistake(
            f"batch_size={batch_size} is not a multiple of the {process_count} processes; "
            f"use {-(-batch_size // process_count) * process_count}"
        )
    if seed < 0:
        raise UserMistake(f"seed={seed} must not be negative")
    sequences = PackedSequences(corpus.train, sequence_length)
    if len(sequences) < batch_size:
        raise DataError(
            f"data.source={corpus.source!r}: {len(corpus.train)} training documents fill {len(sequences)} sequences "
            f"of {sequence_length:,} tokens, fewer than batch_size={batch_size}; "
            "lower batch_size or sequence_length, or add documents"
        )
    # grain seeds epoch e with seed + e. Spreading the seeds keeps runs with seeds 0 and 1 from sharing their epochs.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    dataset = (
        grain.MapDataset.source(sequences)
        .shuffle(seed=shuffle_seed)
        .repeat()[process_index::process_count]
        # Nothing remains of an endless stream, but unless told so grain rounds its length up past len()'s limit.
        .batch(batch_size // process_count, drop_remainder=True)
        .to_iter_dataset(
            grain.ReadOptions(
                num_threads=min(num_prefetch_batches, _MAX_READ_THREADS), prefetch_buffer_size=num_prefetch_batches
            )
        )
    )
    stream = {
        "corpus": corpus.fingerprint,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "seed": seed,
    }
    return TrainIterator(sequences, iter(dataset), stream, corpus.tokenizer.identity)


def make_validation_batches(
    corpus: Corpus, *, sequence_length: int, batch_size: int, num_sequences: int
) -> list[Batch]:
    """The fixed validation set: the same sequences at every call, spread evenly over the packed validation split.

    Args:
        corpus: the corpus.
        sequence_length: tokens in a sequence.
        batch_size: rows in every batch; the last is filled up with rows whose `target_mask` is all False.
        num_sequences: sequences in all.

    Raises:
        DataError: the validation documents fill fewer sequences.
    """
    sequences = PackedSequences(corpus.validation, sequence_length)
    if len(sequences) < num_sequences:
        raise DataError(
            f"data.source={corpus.source!r}: {len(corpus.validation)} validation documents fill {len(sequences)} "
            f"sequences of {sequence_length:,} tokens, fewer than evaluation.num_sequences={num_sequences}; "
            f"lower it to {len(sequences)}, raise data.validation_fraction, or add validation documents"
        )
    # Packing puts the longest documents first, so the first sequences would not be typical.
    rows = [sequences[i * len(sequences) // num_sequences] for i in range(num_sequences)]
    rows += [empty_row(sequence_length)] * (-num_sequences % batch_size)
    return [
        {name: np.stack([row[name] for row in rows[start : start + batch_size]]) for name in rows[0]}
        for start in range(0, len(rows), batch_size)
    ]
