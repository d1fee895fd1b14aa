"""Batches of packed sequences: an endless resumable stream for training, a fixed list for validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.context import SequenceSharding
from trainer.config import SourceConfig, TrainConfig
from trainer.data.batch_reader import BatchReader, BatchShare
from trainer.data.corpora import Corpus
from trainer.data.mixture_iterator import MixtureIterator, MixtureSequences
from trainer.data.sequence_sharding import SequenceSharder
from trainer.data.token_cache import OnProgress
from trainer.data.train_iterator import PackedIterator, TrainIterator
from trainer.data.tree_packing import pack
from trainer.data.validation_set import ValidationSet
from trainer.errors import UserMistake

_MAX_READ_THREADS = 8
# In a mixture's stream: half of what grain can count.
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
        corpus: the corpus.
        sequence_sharding: how each sequence is sharded over `mesh.context`.
        on_progress: called with a line if the documents fill fewer sequences than the config asks for.
        indices_of: a batch size → the indices in the batch of the sequences that this process reads; by default all.
    """
    train = make_train_batches(config, corpus, sequence_sharding, on_progress, indices_of)
    validation = ValidationSet.choose(
        corpus,
        sequence_length=config.sequence_length,
        num_sequences=config.evaluation.num_sequences,
        sources=config.data.sources,
        on_progress=on_progress,
    )
    micro_batch_size = config.batch_size // config.gradient_accumulation
    sharder = SequenceSharder.of(config, sequence_sharding)
    return (
        train,
        validation.batches(micro_batch_size, indices=indices_of(micro_batch_size), sharder=sharder),
        validation,
    )


def make_train_batches(
    config: TrainConfig,
    corpus: Corpus,
    sequence_sharding: SequenceSharding,
    on_progress: OnProgress = lambda line: None,
    indices_of: Callable[[int], Sequence[int]] = range,
) -> TrainIterator:
    """The training stream of a run, or of one of its phases, at its beginning; `set_state` goes on from another's.

    Args:
        config: of the run or the phase.
        corpus: the corpus; it may have more sources than the config draws from.
        sequence_sharding: how each sequence is sharded over `mesh.context`.
        on_progress: called with a line if the documents fill no batch, or when a source runs dry for the first time.
        indices_of: a batch size → the indices in the batch of the sequences that this process reads; by default all.
    """
    sources = config.data.sources
    make: Callable[..., TrainIterator] = (
        functools.partial(make_mixture_iterator, sources=sources) if sources else make_train_iterator
    )
    return make(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        num_prefetch_batches=config.data.num_prefetch_batches,
        indices=indices_of(config.batch_size),
        sharder=SequenceSharder.of(config, sequence_sharding),
        on_progress=on_progress,
    )


def make_train_iterator(
    corpus: Corpus,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    num_prefetch_batches: int,
    indices: Sequence[int] | None = None,
    sharder: SequenceSharder | None = None,
    on_progress: OnProgress = lambda line: None,
) -> PackedIterator:
    """Shuffles, batches, reads and prefetches the training split, with grain.

    Which sequences a batch has depends neither on `indices` nor on `sharder`, and nor does the iterator's state.

    Args:
        corpus: the corpus.
        sequence_length: tokens in a sequence.
        batch_size: sequences in a batch, over all processes.
        seed: of the order; at least 0.
        num_prefetch_batches: batches prepared ahead.
        indices: in each batch, of the sequences that this process reads; None: all.
        sharder: shards each sequence over devices; None: its tokens stay in order.
        on_progress: called with a line if the documents don't fill a batch, so that sequences repeat within it.

    Raises:
        UserMistake: the seed is negative.
    """
    _check_seed(seed)
    sequences = pack(corpus.train, sequence_length)
    if len(sequences) < batch_size:
        on_progress(
            f"training fills {len(sequences)} of the {batch_size} sequences of {sequence_length:,} tokens that "
            "batch_size asks for: they repeat within a batch"
        )
    # grain seeds epoch e with seed + e. Spreading the seeds keeps runs with seeds 0 and 1 from sharing their epochs.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    read = BatchReader.of(sequences, batch_size, indices, sharder)

    def open_at(position: int) -> Any:
        import grain

        numbers = grain.MapDataset.source(range(len(sequences))).shuffle(seed=shuffle_seed).repeat()[position:]
        return _read_ahead(numbers, read, batch_size, num_prefetch_batches)

    stream = {"corpus": corpus.fingerprint, "sequence_length": sequence_length, "seed": seed}
    tokenizer = corpus.tokenizer
    return PackedIterator(
        sequences,
        open_at,
        batch_size=batch_size,
        stream=stream,
        tokenizer=tokenizer.identity,
        delimiters=tokenizer.delimiters,
    )


def make_mixture_iterator(
    corpus: Corpus,
    *,
    sources: tuple[SourceConfig, ...],
    sequence_length: int,
    batch_size: int,
    seed: int,
    num_prefetch_batches: int,
    indices: Sequence[int] | None = None,
    sharder: SequenceSharder | None = None,
    on_progress: OnProgress = lambda line: None,
) -> MixtureIterator:
    """Draws, batches, reads and prefetches the training split of several sources.

    Args:
        corpus: the corpus; it may have more sources.
        sources: to draw from, with their weights.
        sequence_length, batch_size, seed, num_prefetch_batches, indices, sharder: as in `make_train_iterator`.
        on_progress: called with a line when a source runs dry for the first time.

    Raises:
        UserMistake: the seed is negative.
        DataError: a source's weights by length leave no document.
    """
    _check_seed(seed)

    def open_batches(sequences: MixtureSequences) -> Any:
        import grain

        read = BatchReader.of(sequences, batch_size, indices, sharder)
        return _read_ahead(grain.MapDataset.range(_MAX_SEQUENCES), read, batch_size, num_prefetch_batches)

    return MixtureIterator(
        corpus,
        sources,
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
        open_batches=open_batches,
        on_progress=on_progress,
    )


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UserMistake(f"seed={seed} must not be negative")


def _read_ahead(numbers: Any, read: BatchReader, batch_size: int, num_prefetch_batches: int) -> Any:
    """Batches of the sequences of a grain dataset of numbers, read in threads.

    grain is imported where it is used, because it imports JAX and Orbax, and data must be checked without them.
    """
    import grain

    dataset = (
        # The stream is endless. Without drop_remainder grain would round its length up past len()'s limit.
        numbers.batch(batch_size, drop_remainder=True)
        .map(lambda numbers: read(numbers.tolist()))
        .to_iter_dataset(
            grain.ReadOptions(
                num_threads=min(num_prefetch_batches, _MAX_READ_THREADS), prefetch_buffer_size=num_prefetch_batches
            )
        )
    )
    return iter(dataset)
