"""Batches of packed sequences: an endless resumable stream for training, a fixed list for validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.context import SequenceSharding
from trainer.config import TrainConfig
from trainer.data.batch_reader import BatchReader, BatchShare
from trainer.data.corpora import Corpus
from trainer.data.packing import PackedSequences
from trainer.data.sequence_sharding import SequenceSharder
from trainer.data.token_cache import OnProgress
from trainer.data.train_iterator import TrainIterator
from trainer.data.validation_set import ValidationSet
from trainer.errors import UserMistake

_MAX_READ_THREADS = 8


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
    sharder = SequenceSharder.of(config, sequence_sharding)
    train = make_train_iterator(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        num_prefetch_batches=config.data.num_prefetch_batches,
        indices=indices_of(config.batch_size),
        sharder=sharder,
        on_progress=on_progress,
    )
    validation = ValidationSet.choose(
        corpus,
        sequence_length=config.sequence_length,
        num_sequences=config.evaluation.num_sequences,
        on_progress=on_progress,
    )
    micro_batch_size = config.batch_size // config.gradient_accumulation
    return (
        train,
        validation.batches(micro_batch_size, indices=indices_of(micro_batch_size), sharder=sharder),
        validation,
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
) -> TrainIterator:
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
    # Imported here, because grain imports JAX and Orbax, and data must be checked without them.
    import grain

    if seed < 0:
        raise UserMistake(f"seed={seed} must not be negative")
    sequences = PackedSequences(corpus.train, sequence_length)
    if len(sequences) < batch_size:
        on_progress(
            f"training fills {len(sequences)} of the {batch_size} sequences of {sequence_length:,} tokens that "
            "batch_size asks for: they repeat within a batch"
        )
    # grain seeds epoch e with seed + e. Spreading the seeds keeps runs with seeds 0 and 1 from sharing their epochs.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    read = BatchReader.of(sequences, batch_size, indices, sharder)

    def open_at(position: int) -> Any:
        dataset = (
            grain.MapDataset.source(range(len(sequences)))
            .shuffle(seed=shuffle_seed)
            .repeat()[position:]
            # The stream is endless. Without drop_remainder grain would round its length up past len()'s limit.
            .batch(batch_size, drop_remainder=True)
            .map(lambda numbers: read(numbers.tolist()))
            .to_iter_dataset(
                grain.ReadOptions(
                    num_threads=min(num_prefetch_batches, _MAX_READ_THREADS), prefetch_buffer_size=num_prefetch_batches
                )
            )
        )
        return iter(dataset)

    stream = {"corpus": corpus.fingerprint, "sequence_length": sequence_length, "seed": seed}
    tokenizer = corpus.tokenizer
    return TrainIterator(
        sequences,
        open_at,
        batch_size=batch_size,
        stream=stream,
        tokenizer=tokenizer.identity,
        delimiters=tokenizer.delimiters,
    )
