"""The endless stream of training batches, which resumes exactly where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from trainer.data.batch_reader import BatchShare, Sequences
from trainer.data.corpora import Corpus
from trainer.data.epochs import EpochPlace, Epochs
from trainer.data.token_cache import OnProgress
from trainer.data.tree_packing import pack
from trainer.errors import DataError

# Half of what grain can count, so that no place is near the end of its endless stream.
_MAX_POSITION = 2**62


class TrainIterator:
    """Endless batches of training sequences, or one process's shares of them; made by `make_train_iterator`.

    Batches are prepared ahead by threads, and `get_state` speaks of the batches handed out, not of those prepared.

    Args:
        corpus: the corpus.
        sequence_length: tokens in a sequence.
        batch_size: sequences in a batch.
        seed: of the order.
        open_batches: makes batches of the sequences from number 0 on.
    """

    _sequences: Any
    """Those from the place that the iterator went to on."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        open_batches: Callable[[Sequences], Any],
    ):
        self._corpus, self._sequence_length, self._batch_size, self._seed = corpus, sequence_length, batch_size, seed
        self._open_batches = open_batches
        self._batches: Any = None  # opened when first needed

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> BatchShare:
        if self._batches is None:
            self._batches = self._open_batches(self._sequences)
        return next(self._batches)

    @property
    def padding_fraction(self) -> float | None:
        """Share of the positions that holds no target; None: not yet known."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """The place in the stream, ready for JSON. It is small, and the same on every process.

        `position` counts the sequences before the next batch, so that batches of another size can go on from there. The
        state also holds the tokenizer's identity, which tells a reader of a checkpoint what its ids mean, and the
        tokens that begin and end documents.
        """
        raise NotImplementedError

    def set_state(self, state: Any, *, allow_changed: bool = False) -> list[str]:
        """Goes to a place from `get_state`. The same batches follow as did there, bit for bit.

        The batch size may differ. What else may, and what follows from that, is said by the classes.

        Args:
            state: JSON values.
            allow_changed: whether the documents may differ.

        Returns:
            Lines that tell what couldn't be continued exactly; none if everything could.

        Raises:
            DataError: the state is no such state, or of another stream; names what differs.
        """
        raise NotImplementedError

    def skip(self, num_batches: int) -> None:
        """Goes past the next batches, without reading a token.

        Raises:
            DataUsedUpError: no document is left for them.
        """
        raise NotImplementedError

    def mixture(self) -> dict[str, Any] | None:
        """The tokens drawn so far from each source of a mixture, ready for JSON; None: it is none."""
        return None

    def sharing(self) -> dict[str, int] | None:
        """The tokens that trees save, as `PackedTrees.sharing`; None: there are no trees."""
        return None

    def fingerprint(self) -> str:
        """A hex digest that is equal on processes that read the same documents in the same order, at the same place."""
        # The tokenizer's identity names its library's version. Here only the tokens count.
        known = [self._batch_size, {name: value for name, value in self.get_state().items() if name != "tokenizer"}]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        """Stops the threads that prepare batches. The iterator can't be used afterwards."""
        if self._batches is not None:
            self._batches.close()

    def _go_on_with(self, sequences: Sequences) -> None:
        """Hands out batches of other sequences from here on."""
        self.close()
        self._sequences, self._batches = sequences, None

    def _num_read(self) -> int:
        """Sequences of the batches handed out since `_go_on_with`."""
        return 0 if self._batches is None else self._batches.get_state()["next_index"] * self._batch_size

    def _state_at(self, position: int) -> dict[str, Any]:
        tokenizer = self._corpus.tokenizer
        stream = {"corpus": self._corpus.fingerprint, "sequence_length": self._sequence_length, "seed": self._seed}
        return {
            "stream": stream,
            "tokenizer": tokenizer.identity,
            "delimiters": list(tokenizer.delimiters),
            "position": position,
        }

    def _refuse_seed(self, theirs: Any) -> None:
        if theirs != self._seed:
            raise DataError(
                f"the saved data state has seed={theirs!r} but this run has {self._seed!r}: a place in "
                "another order; go back to the seed that the checkpoint was made with, or start in a new workdir"
            )

    def _refuse_tokens(self, state: dict[str, Any], allow_changed: bool) -> None:
        """Refuses other documents of another tokenizer; other delimiters, too, unless `allow_changed` is set."""
        ours = self._corpus.tokenizer
        if state["tokenizer"] != ours.identity:
            raise DataError(
                f"the checkpoint's tokens were made by tokenizer {state['tokenizer']!r}, and this run's by "
                f"{ours.identity!r} (library, its version, and the file's SHA-256): the model doesn't know them; go "
                "back to that tokenizer, or start in a new workdir"
            )
        # States before 2026-11-29 lack the delimiters. Documents then began with the token that ended them.
        delimiters = state.get("delimiters", [ours.delimiters.end] * 2)
        if not allow_changed and delimiters != list(ours.delimiters):
            raise DataError(
                f"the checkpoint's documents begin and end with tokens {str(delimiters)[:40]}, and this run's with "
                f"{list(ours.delimiters)}; set data.begin_of_document_token and data.end_of_document_token to the "
                "former, or go on with a new epoch of what is there now: --data.allow-changed True"
            )

    def _refuse_documents(self, theirs: Any, of: str = "") -> None:
        raise DataError(
            f"the saved data state has corpus={theirs!r} but this run has {self._corpus.fingerprint!r}: the "
            f"documents{of}, or their split, have changed since the checkpoint; put them back, or go on with a new "
            "epoch of those that are there now: --data.allow-changed True"
        )


class PackedIterator(TrainIterator):
    """Endless batches of packed sequences; made by `make_train_iterator`.

    Every epoch visits every sequence once, in an order of its own; a batch may span two epochs, or more of them where
    an epoch has fewer sequences than a batch.

    A state can be taken up under another sequence length: the epoch goes on with the documents that are left of it, as
    `trainer.data.epochs` describes. Other documents begin an epoch, and are refused unless that is allowed.

    Args:
        corpus: the corpus.
        on_progress: called with a line if the documents don't fill a batch, so that sequences repeat within it.
        options: as those of `TrainIterator`.
    """

    _sequences: Epochs

    def __init__(self, corpus: Corpus, *, on_progress: OnProgress, **options: Any):
        super().__init__(corpus, **options)
        self._packed = pack(corpus.train, self._sequence_length)
        self._go_to(EpochPlace())
        if (num_sequences := len(self._packed)) < self._batch_size:
            on_progress(
                f"training fills {num_sequences} of the {self._batch_size} sequences of {self._sequence_length:,} "
                "tokens that batch_size asks for: they repeat within a batch"
            )

    @property
    def padding_fraction(self) -> float:
        return self._packed.padding_fraction

    def sharing(self) -> dict[str, int] | None:
        return self._packed.sharing()

    def get_state(self) -> dict[str, Any]:
        num_read = self._num_read()
        return self._state_at(self._start + num_read) | self._sequences.place(num_read).to_json()

    def set_state(self, state: Any, *, allow_changed: bool = False) -> list[str]:
        theirs, position = read_state(state)
        self._refuse_seed(theirs.get("seed"))
        is_same = theirs.get("corpus") == self._corpus.fingerprint
        if not is_same:
            self._refuse_tokens(state, allow_changed)
            if not allow_changed:
                self._refuse_documents(theirs.get("corpus"))
        try:
            # The corpus of a mixture is another one.
            place = EpochPlace() if "mixture" in state and not is_same else EpochPlace.from_json(state)
            self._go_to(place if is_same else EpochPlace(place.epoch + bool(place.read)), position)
        except (TypeError, KeyError, ValueError) as error:
            raise unreadable(error) from error
        if is_same:
            return self._describe_length(place.epoch + 1, theirs.get("sequence_length"))
        return [
            (
                "the documents are other ones than before (corpus changed): an epoch begins with them, none left out, "
                "so that what was read of an unfinished one comes again"
            ),
            (
                "the validation documents may be other ones, too, and such as have been trained on: losses don't "
                "compare with those up to here"
            ),
        ]

    def skip(self, num_batches: int) -> None:
        num_read = self._num_read() + num_batches * self._batch_size
        self._go_to(self._sequences.place(num_read), self._start + num_read)

    def _go_to(self, place: EpochPlace, position: int = 0) -> None:
        self._go_on_with(Epochs(self._packed, self._seed, place))
        self._start = position

    def _describe_length(self, epoch: int, before: Any) -> list[str]:
        """A line if the sequences have another length than before."""
        if before == self._sequence_length:
            return []
        num_left = len(self._sequences.rest.documents)
        return [
            (
                f"documents are packed into sequences of {self._sequence_length:,} tokens (sequence_length={before} "
                f"before): epoch {epoch} goes on with {num_left:,} of its {len(self._corpus.train):,} documents, those "
                "that are left"
            )
        ]


def read_state(state: Any) -> tuple[dict[str, Any], int]:
    """The stream and the position that a state holds.

    Raises:
        DataError: it is no state.
    """
    try:
        stream, position = state["stream"], state["position"]
        if "tokenizer" not in state:
            raise KeyError("tokenizer")
        if not isinstance(stream, dict):
            raise TypeError(f"stream={stream!r}")
        if type(position) is not int or not 0 <= position <= _MAX_POSITION:
            raise ValueError(f"{position!r} is no count of sequences")
    except (TypeError, KeyError, ValueError) as error:
        raise unreadable(error) from error
    return stream, position


def unreadable(error: Exception) -> DataError:
    """The refusal of a state that can't be read."""
    return DataError(
        f"the checkpoint's data state can't be read ({type(error).__name__}: {str(error)[:80]}); move the "
        "checkpoint elsewhere to go on from the one before it, or start in a new workdir"
    )
