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

    Batches are prepared ahead by threads, and `get_state` speaks of the batches handed out, not of those prepared.

    Args:
        num_sequences: sequences in an epoch.
        batch_size: sequences in a batch.
        stream: says which sequences these are: equal only if they are.
        tokenizer, delimiters: of the documents.

    Attributes:
        num_sequences: sequences in an epoch.
    """

    def __init__(
        self, num_sequences: int, *, batch_size: int, stream: dict[str, Any], tokenizer: str, delimiters: Delimiters
    ):
        self.num_sequences = num_sequences
        self._batch_size, self._stream, self._tokenizer, self._delimiters = batch_size, stream, tokenizer, delimiters
        self._open: Callable[[], Any] = lambda: iter(())
        self._batches: Any = None  # opened when first needed

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> BatchShare:
        if self._batches is None:
            self._batches = self._open()
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

    def _go_on_with(self, open_batches: Callable[[], Any]) -> None:
        """Hands out other batches from here on."""
        self.close()
        self._open, self._batches = open_batches, None

    def _num_read(self) -> int:
        """Sequences of the batches handed out since `_go_on_with`."""
        return 0 if self._batches is None else self._batches.get_state()["next_index"] * self._batch_size

    def _state_at(self, position: int) -> dict[str, Any]:
        return {
            "stream": dict(self._stream),
            "tokenizer": self._tokenizer,
            "delimiters": list(self._delimiters),
            "position": position,
            "num_sequences": self.num_sequences,
        }

    def _refuse_seed(self, theirs: Any) -> None:
        if theirs != self._stream["seed"]:
            raise DataError(
                f"the saved data state has seed={theirs!r} but this run has {self._stream['seed']!r}: a place in "
                "another order; go back to the seed that the checkpoint was made with, or start in a new workdir"
            )

    def _refuse_tokens(self, state: dict[str, Any], allow_changed: bool) -> None:
        """Refuses other documents of another tokenizer; other delimiters, too, unless `allow_changed` is set."""
        if state["tokenizer"] != self._tokenizer:
            raise DataError(
                f"the checkpoint's tokens were made by tokenizer {state['tokenizer']!r}, and this run's by "
                f"{self._tokenizer!r} (library, its version, and the file's SHA-256): the model doesn't know them; go "
                "back to that tokenizer, or start in a new workdir"
            )
        # States before 2026-11-29 lack the delimiters. Documents then began with the token that ended them.
        delimiters = state.get("delimiters", [self._delimiters.end] * 2)
        if not allow_changed and delimiters != list(self._delimiters):
            raise DataError(
                f"the checkpoint's documents begin and end with tokens {str(delimiters)[:40]}, and this run's with "
                f"{list(self._delimiters)}; set data.begin_of_document_token and data.end_of_document_token to the "
                "former, or go on with a new epoch of what is there now: --data.allow-changed True"
            )

    def _refuse_documents(self, theirs: Any, of: str = "") -> None:
        raise DataError(
            f"the saved data state has corpus={theirs!r} but this run has {self._stream['corpus']!r}: the "
            f"documents{of}, or their split, have changed since the checkpoint; put them back, or go on with a new "
            "epoch of those that are there now: --data.allow-changed True"
        )


class PackedIterator(TrainIterator):
    """Endless batches of packed sequences; made by `make_train_iterator`.

    Every epoch visits every sequence once, in an order of its own; a batch may span two epochs, or more of them where
    an epoch has fewer sequences than a batch.

    It goes to every place in the same short time. If the sequences have changed, there is no such place, and a new
    epoch begins. Another sequence length always changes them. Other documents change them too, and are refused unless
    that is allowed.

    Args:
        sequences: the packed sequences.
        open_at: makes batches from a position on.
        options: as those of `TrainIterator`.
    """

    def __init__(self, sequences: PackedSequences, open_at: Callable[[int], Any], **options: Any):
        super().__init__(len(sequences), **options)
        self._padding_fraction, self._sharing = sequences.padding_fraction, sequences.sharing()
        self._open_at = open_at
        self._go_to(0)

    @property
    def padding_fraction(self) -> float:
        return self._padding_fraction

    def sharing(self) -> dict[str, int] | None:
        return self._sharing

    def get_state(self) -> dict[str, Any]:
        return self._state_at(self._start + self._num_read())

    def set_state(self, state: Any, *, allow_changed: bool = False) -> list[str]:
        theirs, position, num_sequences = read_state(state)
        notes = []
        changed = [name for name in self._stream if theirs.get(name) != self._stream[name]]
        if changed or "mixture" in state:
            self._refuse_seed(theirs.get("seed"))
            if "corpus" in changed:
                self._refuse_tokens(state, allow_changed)
                if not allow_changed:
                    self._refuse_documents(theirs.get("corpus"))
            changed = changed or ["mixture"]
            remedy = "; data.sources, of one source too, would go on with the documents that are left"
            num_epochs = position / num_sequences
            epoch = min(math.ceil(num_epochs), _MAX_POSITION // self.num_sequences)
            notes.append(
                f"the sequences are other ones than before ({' and '.join(changed)} changed): the run has seen about "
                f"{num_epochs:.2f} epochs of those before and begins epoch {epoch + 1} with the new ones, none left "
                "out, so that what it has seen of an unfinished epoch comes again"
                + (remedy if changed == ["sequence_length"] else "")
            )
            if "corpus" in changed:
                notes.append(
                    "the validation documents may be other ones, too, and such as have been trained on: losses don't "
                    "compare with those up to here"
                )
            position = epoch * self.num_sequences
        self._go_to(position)
        return notes

    def skip(self, num_batches: int) -> None:
        self._go_to(self._start + self._num_read() + num_batches * self._batch_size)

    def _go_to(self, position: int) -> None:
        self._start = position
        self._go_on_with(lambda: self._open_at(position))


def read_state(state: Any) -> tuple[dict[str, Any], int, int]:
    """The stream, the position and the sequences of an epoch that a state holds.

    Raises:
        DataError: it is no state.
    """
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
        raise unreadable(error) from error
    return stream, position, num_sequences


def unreadable(error: Exception) -> DataError:
    """The refusal of a state that can't be read."""
    return DataError(
        f"the checkpoint's data state can't be read ({type(error).__name__}: {str(error)[:80]}); move the "
        "checkpoint elsewhere to go on from the one before it, or start in a new workdir"
    )
