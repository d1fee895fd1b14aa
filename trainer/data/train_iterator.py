"""The endless stream of training batches, which resumes exactly where it was."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

from trainer.data.batch_reader import BatchShare
from trainer.data.documents import Delimiters
from trainer.data.packing import PackedSequences
from trainer.errors import DataError

# Half of what grain can count, so that no place is near the end of its endless stream.
_MAX_POSITION = 2**62


class TrainIterator:
    """Endless batches of training sequences, or one process's shares of them; made by `make_train_iterator`.

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
        delimiters: Delimiters,
    ):
        self.num_sequences = len(sequences)
        self.padding_fraction = sequences.padding_fraction
        self._open_at = open_at
        self._batch_size = batch_size
        self._stream = stream
        self._tokenizer = tokenizer
        self._delimiters = delimiters
        self._start = 0
        self._batches = open_at(0)

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> BatchShare:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The place in the stream, ready for JSON. It has a few hundred bytes, and is the same on every process.

        `position` counts the sequences, of all epochs, before the next batch, so that batches of another size can go
        on from there. The state also holds the tokenizer's identity, which tells a reader of a checkpoint what its ids
        mean, and the tokens that begin and end documents.
        """
        return {
            "stream": dict(self._stream),
            "tokenizer": self._tokenizer,
            "delimiters": list(self._delimiters),
            "position": self._start + self._batches.get_state()["next_index"] * self._batch_size,
            "num_sequences": self.num_sequences,
        }

    def fingerprint(self) -> str:
        """A hex digest that is equal on processes that read the same documents in the same order, at the same place."""
        # The tokenizer's identity names its library's version. Here only the tokens count.
        known = [self._batch_size, {name: value for name, value in self.get_state().items() if name != "tokenizer"}]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

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
            num_epochs = position / num_sequences
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
        if "corpus" in changed and state["tokenizer"] != self._tokenizer:
            raise DataError(
                f"the checkpoint's tokens were made by tokenizer {state['tokenizer']!r}, and this run's by "
                f"{self._tokenizer!r} (library, its version, and the file's SHA-256): the model doesn't know them; go "
                "back to that tokenizer, or start in a new workdir"
            )
        # States before 2026-11-29 lack the delimiters. Documents then began with the token that ended them.
        delimiters = state.get("delimiters", [self._delimiters.end] * 2)
        if "corpus" in changed and not allow_changed and delimiters != list(self._delimiters):
            raise DataError(
                f"the checkpoint's documents begin and end with tokens {str(delimiters)[:40]}, and this run's with "
                f"{list(self._delimiters)}; set data.begin_of_document_token and data.end_of_document_token to the "
                "former, or go on with a new epoch of what is there now: --data.allow-changed True"
            )
        if "corpus" in changed and not allow_changed:
            raise DataError(
                f"the saved data state has corpus={theirs.get('corpus')!r} but this run has "
                f"{self._stream['corpus']!r}: the documents, or their split, have changed since the checkpoint; put "
                "them back, or go on with a new epoch of those that are there now: --data.allow-changed True"
            )


def _read_state(state: Any) -> tuple[dict[str, Any], int, int]:
    """The stream, the position and the sequences of an epoch that a state holds."""
    try:
        stream, position, num_sequences = (state[name] for name in ("stream", "position", "num_sequences"))
        if "tokenizer" not in state:
            raise KeyError("tokenizer")
        if not isinstance(stream, dict):
            raise TypeError(f"stream={stream!r}")
        for count, least in ((position, 0), (num_sequences, 1)):
            if type(count) is not int or not least <= count <= _MAX_POSITION:
                raise ValueError(f"{count!r} is no count of sequences")
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"the checkpoint's data state can't be read ({type(error).__name__}: {str(error)[:80]}); move the "
            "checkpoint elsewhere to go on from the one before it, or start in a new workdir"
        ) from error
    return stream, position, num_sequences
