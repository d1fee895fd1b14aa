"""Batches of packed sequences: an endless resumable stream for training, a fixed list for validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernels.context import SequenceSharding
from trainer.config import SourceConfig, TrainConfig
from trainer.data.batch_reader import BatchReader, BatchShare
from trainer.data.corpora import Corpus
from trainer.data.mixture_iterator import MixtureIterator
from trainer.data.sequence_sharding import SequenceSharder
from trainer.data.token_cache import OnProgress
from trainer.data.train_iterator import PackedIterator, TrainIterator
from trainer.data.validation_set import ValidationSet
from trainer.errors import UserMistake

_MAX_READ_THREADS = 8
# Half of what grain can count.
_MAX_SEQUENCES = 2**62


def make_batches(
    config: TrainConfig,
    corpus: Corpus,
    sequence_sharding: SequenceSharding,
    on_progress: OnProgress,
    indices_of: Callable[[int], Sequence[int]] = range,
) -> tuple[TrainIterator, list[BatchShare], ValidationSet]:
    """The training stream, the validation batches, and the sequences that these are made of.

    Args:
        config: says how many sequences of which length a batch has; a validation batch has a micro-batch's.
        corpus: the corpus; it may have more sources than the config draws from.
        sequence_sharding: how each sequence is sharded over `mesh.context`.
        on_progress: called with a line if the documents fill another number of sequences than the config asks for, or
            when a source runs dry for the first time.
        indices_of: a batch size → the indices in the batch of the sequences that this process reads; by default all.
    """
    sources, sharder = config.data.sources, SequenceSharder.of(config, sequence_sharding)
    train = make_train_batches(config, corpus, on_progress, indices=indices_of(config.batch_size), sharder=sharder)
    validation = ValidationSet.choose(
        corpus,
        sequence_length=config.sequence_length,
        num_sequences=config.evaluation.num_sequences,
        sources=sources,
        on_progress=on_progress,
    )
    micro_batch_size = config.batch_size // config.gradient_accumulation
    batches = validation.batches(micro_batch_size, indices=indices_of(micro_batch_size), sharder=sharder)
    return train, batches, validation


def make_train_batches(
    config: TrainConfig,
    corpus: Corpus,
    on_progress: OnProgress,
    *,
    indices: Sequence[int] | None = None,
    sharder: SequenceSharder | None = None,
) -> TrainIterator:
    """The training stream of a config. Arguments are as in `make_batches` and `make_train_iterator`."""
    return make_train_iterator(
        corpus,
        sources=config.data.sources,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        num_prefetch_batches=config.data.num_prefetch_batches,
        indices=indices,
        sharder=sharder,
        on_progress=on_progress,
    )


def make_train_iterator(
    corpus: Corpus,
    *,
    sources: Sequence[SourceConfig] = (),
    sequence_length: int,
    batch_size: int,
    seed: int,
    num_prefetch_batches: int,
    indices: Sequence[int] | None = None,
    sharder: SequenceSharder | None = None,
    on_progress: OnProgress = lambda line: None,
) -> TrainIterator:
    """Orders or draws sequences of the training split, and reads them ahead in batches.

    Which sequences a batch has depends neither on `indices` nor on `sharder`, and nor does the iterator's state. The
    iterator is at its beginning; `set_state` goes on from another's.

    Args:
        corpus: the corpus; it may have more sources.
        sources: to draw from, with their weights; empty: the corpus is no mixture.
        sequence_length: tokens in a sequence.
        batch_size: sequences in a batch, over all processes.
        seed: of the order; at least 0.
        num_prefetch_batches: batches prepared ahead.
        indices: in each batch, of the sequences that this process reads; None: all.
        sharder: shards each sequence over devices; None: its tokens stay in order.
        on_progress: called with a line if the documents don't fill a batch, so that sequences repeat within it, or when
            a source runs dry for the first time.

    Raises:
        UserMistake: the seed is negative.
        DataError: a source's weights by length leave no document.
    """
    if seed < 0:
        raise UserMistake(f"seed={seed} must not be negative")
    options: dict[str, Any] = {
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "seed": seed,
        "open_batches": lambda sequences: _read_ahead(
            BatchReader.of(sequences, batch_size, indices, sharder), batch_size, num_prefetch_batches
        ),
        "on_progress": on_progress,
    }
    return MixtureIterator(corpus, tuple(sources), **options) if sources else PackedIterator(corpus, **options)


def _read_ahead(read: BatchReader, batch_size: int, num_prefetch_batches: int) -> Any:
    """Batches of the sequences from number 0 on, read in threads."""
    # It is imported where it is used, because it imports JAX and Orbax, and data must be checked without them.
    import grain

    dataset = (
        # The stream is endless. Without drop_remainder grain would round its length up past len()'s limit.
        grain.MapDataset.range(_MAX_SEQUENCES)
        .batch(batch_size, drop_remainder=True)
        .map(lambda numbers: read(numbers.tolist()))
        .to_iter_dataset(
            grain.ReadOptions(
                num_threads=min(num_prefetch_batches, _MAX_READ_THREADS), prefetch_buffer_size=num_prefetch_batches
            )
        )
    )
    return iter(dataset)
