"""Batches of packed sequences: an endless resumable stream for training, a fixed list for validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.data.corpora import Corpus
from trainer.data.errors import DataError
from trainer.data.packing import Batch, PackedSequences, empty_sequence
from trainer.data.token_cache import OnProgress
from trainer.errors import UserMistake

_MAX_READ_THREADS = 8
# Half of what grain can count, so that no place is near the end of its endless stream.
_MAX_POSITION = 2**62


class TrainIterator:
    """Endless batches of training sequences; made by `make_train_iterator`.

    Every epoch visits every sequence once, in an order of its own; a batch may span two epochs, or more of them where
    an epoch has fewer sequences than a batch. Batches are prepared ahead by threads, and `get_state` speaks of the
    batches handed out, not of those prepared.

    Attributes:
        num_sequences: sequences in an epoch.
        padding_fraction: share of an epoch's positions that holds no target.
    """

    def __init__(
        self,
        sequences: PackedSequences,
        open_at: Callable[[int], Any],
        *,
        batch_size: int,
        stream: dict[str, Any],
        tokenizer: str,
    ):
        self.num_sequences = len(sequences)
        self.padding_fraction = sequences.padding_fraction
        self._open_at = open_at
        self._batch_size = batch_size
        self._stream = stream
        self._tokenizer = tokenizer
        self._start = 0
        self._batches = open_at(0)

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The place in the stream, ready for JSON. It has a few hundred bytes, and is the same on every process.

        `position` counts the sequences, of all epochs, before the next batch, so that batches of another size can go
        on from there. The state also holds the tokenizer's identity, which tells a reader of a checkpoint what its ids
        mean.
        """
        return {
            "stream": dict(self._stream),
            "tokenizer": self._tokenizer,
            "position": self._start + self._batches.get_state()["next_index"] * self._batch_size,
            "num_sequences": self.num_sequences,
        }

    def set_state(self, state: Any, *, allow_changed: bool = False) -> list[str]:
        """Goes to a place from `get_state`. The same batches follow as did there, bit for bit.

        It takes the same short time for every place. The batch size may differ. If the sequences have changed, there is
        no such place, and a new epoch begins. Another sequence length always changes them. Other documents change them
        too, and are refused unless `allow_changed` is set.

        Args:
            state: JSON values.
            allow_changed: whether the documents may differ.

        Returns:
            Lines that tell what couldn't be continued exactly; none if everything could.

        Raises:
            DataError: the state is no such state, or of another stream; names what differs.
        """
        theirs, position, num_sequences = _read_state(state)
        notes = []
        if changed := [name for name in self._stream if theirs.get(name) != self._stream[name]]:
            self._refuse(changed, state, allow_changed)
            num_epochs = position / (num_sequences or self.num_sequences)
            epoch = min(math.ceil(num_epochs), _MAX_POSITION // self.num_sequences)
            notes.append(
                f"the sequences are other ones than before ({' and '.join(changed)} changed): the run has seen about "
                f"{num_epochs:.2f} epochs of those before and begins epoch {epoch + 1} with the new ones, none left "
                "out, so that what it has seen of an unfinished epoch comes again"
            )
            if "corpus" in changed:
                notes.append(
                    "the validation documents may be other ones, too, and such as have been trained on: losses don't "
                    "compare with those up to here"
                )
            position = epoch * self.num_sequences
        self._batches.close()
        self._start, self._batches = position, self._open_at(position)
        return notes

    def close(self) -> None:
        """Stops the threads that prepare batches. The iterator can't be used afterwards."""
        self._batches.close()

    def _refuse(self, changed: list[str], state: dict[str, Any], allow_changed: bool) -> None:
        """Refuses changes that a new epoch can't make up for."""
        theirs = state["stream"]
        if "seed" in changed:
            raise DataError(
                f"the saved data state has seed={theirs.get('seed')!r} but this run has {self._stream['seed']!r}: "
                "a place in another order; go back to the seed that the checkpoint was made with, or start in a new "
                "workdir"
            )
        if "corpus" in changed and state.get("tokenizer") != self._tokenizer:
            raise DataError(
                f"the checkpoint's tokens were made by tokenizer {state.get('tokenizer')!r}, and this run's by "
                f"{self._tokenizer!r} (library, its version, and the file's SHA-256): the model doesn't know them; go "
                "back to that tokenizer, or start in a new workdir"
            )
        if "corpus" in changed and not allow_changed:
            raise DataError(
                f"the saved data state has corpus={theirs.get('corpus')!r} but this run has "
                f"{self._stream['corpus']!r}: the documents, or their split, have changed since the checkpoint; put "
                "them back, or go on with a new epoch of those that are there now: --data.allow-changed True"
            )


def _read_state(state: Any) -> tuple[dict[str, Any], int, int | None]:
    """The stream, the position and the sequences of an epoch that a state holds. Old states lack the last: None."""
    try:
        stream = state["stream"]
        if "grain" in state:
            counts = (state["grain"]["next_index"], stream["batch_size"])
        else:
            counts = (state["position"], state["num_sequences"])
        if not isinstance(stream, dict):
            raise TypeError(f"stream={stream!r}")
        for count, least in zip(counts, (0, 1), strict=True):
            if type(count) is not int or not least <= count <= _MAX_POSITION:
                raise ValueError(f"{count!r} is no count of sequences")
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"the checkpoint's data state can't be read ({type(error).__name__}: {str(error)[:80]}); move the "
            "checkpoint elsewhere to go on from the one before it, or start in a new workdir"
        ) from error
    if "grain" in state:
        return stream, min(counts[0] * counts[1], _MAX_POSITION), None
    return stream, *counts


def make_batches(config: TrainConfig, corpus: Corpus, on_progress: OnProgress) -> tuple[TrainIterator, list[Batch]]:
    """The training stream and the validation batches of a config.

    Args:
        config: says how many sequences of which length a batch has; a validation batch has a micro-batch's.
        corpus: the corpus.
        on_progress: told, in one line, if the documents fill fewer sequences than the config asks for.
    """
    train = make_train_iterator(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        num_prefetch_batches=config.data.num_prefetch_batches,
        on_progress=on_progress,
    )
    validation = make_validation_batches(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size // config.gradient_accumulation,
        num_sequences=config.evaluation.num_sequences,
        on_progress=on_progress,
    )
    return train, validation


def make_train_iterator(
    corpus: Corpus,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    num_prefetch_batches: int,
    process_index: int = 0,
    process_count: int = 1,
    on_progress: OnProgress = lambda line: None,
) -> TrainIterator:
    """Shuffles, shards, batches and prefetches the training split, with grain.

    Args:
        corpus: the corpus.
        sequence_length: tokens in a sequence.
        batch_size: sequences in a batch, over all processes; each process gets `batch_size / process_count` of them.
            The union of the processes' batches does not depend on their count.
        seed: of the order; at least 0.
        num_prefetch_batches: batches prepared ahead.
        process_index: which share of each batch.
        process_count: shares that each batch is split into.
        on_progress: called with a line if the documents don't fill a batch, so that sequences repeat within it.

    Raises:
        UserMistake: the batch can't be shared equally, or the seed is negative.
    """
    # Imported here, because grain imports JAX and Orbax, and data must be checked without them.
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
        on_progress(
            f"training fills {len(sequences)} of the {batch_size} sequences of {sequence_length:,} tokens that "
            "batch_size asks for: they repeat within a batch"
        )
    # grain seeds epoch e with seed + e. Spreading the seeds keeps runs with seeds 0 and 1 from sharing their epochs.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def open_at(position: int) -> Any:
        dataset = (
            grain.MapDataset.source(sequences)
            .shuffle(seed=shuffle_seed)
            .repeat()[position + process_index :: process_count]
            # The stream is endless. Without drop_remainder grain would round its length up past len()'s limit.
            .batch(batch_size // process_count, drop_remainder=True)
            .to_iter_dataset(
                grain.ReadOptions(
                    num_threads=min(num_prefetch_batches, _MAX_READ_THREADS), prefetch_buffer_size=num_prefetch_batches
                )
            )
        )
        return iter(dataset)

    stream = {"corpus": corpus.fingerprint, "sequence_length": sequence_length, "seed": seed}
    return TrainIterator(sequences, open_at, batch_size=batch_size, stream=stream, tokenizer=corpus.tokenizer.identity)


def make_validation_batches(
    corpus: Corpus,
    *,
    sequence_length: int,
    batch_size: int,
    num_sequences: int,
    on_progress: OnProgress = lambda line: None,
) -> list[Batch]:
    """The fixed validation set: the same sequences at every call, evenly spread over the packed validation split.

    Args:
        corpus: the corpus.
        sequence_length: tokens in a sequence.
        batch_size: sequences in every batch; the last is filled up with sequences whose `target_mask` is all False.
        num_sequences: sequences in all; fewer where the validation documents don't fill as many.
        on_progress: called with a line if they don't.
    """
    sequences = PackedSequences(corpus.validation, sequence_length)
    if len(sequences) < num_sequences:
        on_progress(
            f"validation fills {len(sequences)} of the {num_sequences} sequences of {sequence_length:,} tokens that "
            "evaluation.num_sequences asks for"
        )
        num_sequences = len(sequences)
    # Packing puts the longest documents first, so the first sequences would not be typical.
    chosen = [sequences[i * len(sequences) // num_sequences] for i in range(num_sequences)]
    chosen += [empty_sequence(sequence_length)] * (-num_sequences % batch_size)
    return [
        {name: np.stack([sequence[name] for sequence in chosen[start : start + batch_size]]) for name in chosen[0]}
        for start in range(0, len(chosen), batch_size)
    ]
