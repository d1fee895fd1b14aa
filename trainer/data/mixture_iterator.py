"""The endless stream of a mixture's training batches, which resumes exactly where it was."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from trainer.config import SourceConfig
from trainer.data.batch_reader import BatchShare
from trainer.data.corpora import Corpus
from trainer.data.documents import Documents
from trainer.data.mixture import LENGTHS, Mixture, MixturePlace, SourcePlace
from trainer.data.packing import Piece, empty_sequence, fill_sequence
from trainer.data.token_cache import OnProgress
from trainer.data.train_iterator import TrainIterator, read_state, unreadable


class MixtureSequences:
    """The sequences of a mixture by their numbers, for several threads. Numbers begin at 0, at the mixture's place.

    They are planned one after another, and kept until `forget`.

    Args:
        documents: of all sources, end to end.
        sequence_length: T.
        mixture: plans them.
        batch_size: the place before each so many sequences is kept, too.
    """

    def __init__(self, documents: Documents, sequence_length: int, mixture: Mixture, batch_size: int):
        self.documents, self.sequence_length = documents, sequence_length
        self._mixture, self._batch_size = mixture, batch_size
        self._lock = threading.Lock()
        self._num_planned = 0
        self._pieces: dict[int, list[Piece]] = {}
        self._places = {0: mixture.place()}

    def __getitem__(self, number: int) -> dict[str, Shaped[np.ndarray, " T"]]:
        return fill_sequence(self.documents, self._plan(number), self.sequence_length)

    def document_lengths(self, number: int) -> Int64[np.ndarray, " P"]:
        """The lengths of the pieces of one sequence, in order. No token is read for them."""
        return np.array([piece.length for piece in self._plan(number)], np.int64)

    def document_numbers(self, number: int) -> Int64[np.ndarray, " P"]:
        """The numbers of the documents that the pieces of one sequence are of, in order."""
        return np.array([piece.document for piece in self._plan(number)], np.int64)

    def empty_sequence(self) -> dict[str, Shaped[np.ndarray, " T"]]:
        """A sequence of padding."""
        return empty_sequence(self.sequence_length)

    def place(self, number: int) -> MixturePlace:
        """The place before a sequence that begins a batch."""
        with self._lock:
            return self._places[number]

    def forget(self, before: int) -> None:
        """Drops the plans of the sequences before a number, which have been read."""
        with self._lock:
            for plans in (self._pieces, self._places):
                for number in [number for number in plans if number < before]:
                    del plans[number]

    def _plan(self, number: int) -> list[Piece]:
        with self._lock:
            while self._num_planned <= number:
                self._pieces[self._num_planned] = self._mixture.plan_sequence()
                self._num_planned += 1
                if self._num_planned % self._batch_size == 0:
                    self._places[self._num_planned] = self._mixture.place()
            return self._pieces[number]


class MixtureIterator(TrainIterator):
    """Endless batches of a mixture's sequences; made by `make_train_iterator`.

    Its state holds the place in every source, those of earlier phases included. A state can be taken up under another
    sequence length, other weights and other sources: each source goes on where it was, with the pieces that are left of
    its documents, and the shares count from there on.

    Args:
        corpus: holds the sources.
        sources: to draw from, by name.
        on_progress: called with a line when a source runs dry for the first time.
        options: as those of `TrainIterator`.

    Raises:
        DataError: a source's weights by length leave no document.
    """

    _sequences: MixtureSequences

    def __init__(self, corpus: Corpus, sources: tuple[SourceConfig, ...], *, on_progress: OnProgress, **options: Any):
        assert {source.name for source in sources} <= corpus.sources.keys(), "phases have the run's sources"
        super().__init__(corpus, **options)
        self._sources, self._on_progress = sources, on_progress
        self._num_targets = {
            name: each.train.within(self._sequence_length).num_targets for name, each in corpus.sources.items()
        }
        self._go_to(MixturePlace())

    def __next__(self) -> BatchShare:
        batch = super().__next__()
        self._sequences.forget(self._num_read())
        return batch

    @property
    def padding_fraction(self) -> float | None:
        """Share of the positions so far that holds no target; None before the first batch."""
        place = self.place()
        total = place.num_sequences * self._sequence_length
        return place.num_padding / total if total else None

    def place(self) -> MixturePlace:
        """The place behind the batches handed out."""
        return self._sequences.place(self._num_read())

    def mixture(self) -> dict[str, Any]:
        """The mixture drawn so far, ready for JSON."""
        place = self.place()
        total = sum(source.num_tokens for source in place.sources.values())
        return {
            name: {
                "num_tokens": source.num_tokens,
                "share": source.num_tokens / total if total else 0.0,
                "num_epochs": source.epoch,
                "num_tokens_by_length": {
                    str(least): count for least, count in zip(LENGTHS, source.tokens_by_length, strict=True)
                },
            }
            for name, source in place.sources.items()
        }

    def get_state(self) -> dict[str, Any]:
        place = self.place()
        mixture = {
            **place.to_json(),
            "fingerprints": {name: each.fingerprint for name, each in self._corpus.sources.items()},
        }
        return self._state_at(place.num_sequences) | {"mixture": mixture}

    def set_state(self, state: Any, *, allow_changed: bool = False) -> list[str]:
        theirs, position = read_state(state)
        self._refuse_seed(theirs.get("seed"))
        is_same = theirs.get("corpus") == self._corpus.fingerprint
        if not is_same:
            self._refuse_tokens(state, allow_changed)
        if "mixture" not in state:
            if not is_same and not allow_changed:
                self._refuse_documents(theirs.get("corpus"))
            self._go_to(MixturePlace(num_sequences=position))
            return ["the mixture begins with the first documents of its sources"]
        try:
            place = MixturePlace.from_json(state["mixture"])
            fingerprints = {str(name): str(digest) for name, digest in state["mixture"]["fingerprints"].items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise unreadable(error) from error
        ours = {name: each.fingerprint for name, each in self._corpus.sources.items()}
        changed = [name for name in place.sources if name in ours and ours[name] != fingerprints.get(name)]
        if changed and not allow_changed:
            self._refuse_documents(theirs.get("corpus"), f" of the sources {', '.join(changed)}")
        if changed:  # the counts stay, and the shares count from here on
            anew = {name: SourcePlace(tokens_by_length=place.sources[name].tokens_by_length) for name in changed}
            place = place._replace(sources={**place.sources, **anew}, shares=(0, {}))
        try:
            self._go_to(place)
        except ValueError as error:
            raise unreadable(error) from error
        notes = [f"the documents of {name!r} are other ones than before: it begins at its first" for name in changed]
        drawn = [source.name for source in self._sources if source.weight > 0]
        new = [name for name in drawn if name not in place.sources]
        left = [name for name in place.sources if name not in drawn]
        notes += [f"{name!r} is new in the mixture, and begins at its first document" for name in new]
        notes += [f"{name!r} is no longer drawn from, and keeps its place" for name in left]
        return notes

    def skip(self, num_batches: int) -> None:
        mixture = self._mixture_at(self.place())
        for _ in range(num_batches * self._batch_size):
            mixture.plan_sequence()
        self._go_to(mixture.place())

    def _go_to(self, place: MixturePlace) -> None:
        mixture = self._mixture_at(place)
        self._go_on_with(MixtureSequences(self._corpus.train, self._sequence_length, mixture, self._batch_size))

    def _mixture_at(self, place: MixturePlace) -> Mixture:
        return Mixture(
            self._sources,
            self._num_targets,
            sequence_length=self._sequence_length,
            seed=self._seed,
            place=place,
            on_progress=self._on_progress,
        )
