"""Losses of real documents: by position, by the context before, and by the document's length. All is NumPy.

A document is a stream of tokens; its target at index t is predicted from the t + 1 tokens before it. Targets count by
their weights, as in training: of a chat those of the assistant alone.

Shapes: n targets of a stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int32

from trainer.data import Documents
from trainer.evaluate.results import Line

NUM_LAST = 512
"""Tokens at the end of a document whose loss shows what context is worth; fewer if the shortest context has few."""
_FIRST_EDGE = 16


class DocumentPart(NamedTuple):
    """A stream that is evaluated: targets [start, stop) of a document, given the tokens from `start` on."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class ChosenDocuments:
    """The parts of documents that one forward pass goes over, and the bins that their losses fall into.

    Attributes:
      lengths: those of the command that some document fills, rising.
      long: documents as long as the longest of these, cut to it.
      contexts: for each length the end of each of these documents, with as much context.
      others: documents of all lengths, whole or cut to the longest; the long ones are left out.
    """

    lengths: tuple[int, ...]
    long: tuple[DocumentPart, ...]
    contexts: tuple[DocumentPart, ...]
    others: tuple[DocumentPart, ...]

    @classmethod
    def choose(cls, documents: Documents, lengths: Sequence[int], num_documents: int, seed: int) -> ChosenDocuments:
        """Chooses documents at random.

        Args:
          documents: all there are.
          lengths: of contexts, rising.
          num_documents: most documents of each power of two in length, and most of the longest.
          seed: of the choice.
        """
        num_targets = np.asarray(documents.num_targets)
        order = np.random.default_rng(seed).permutation(len(num_targets))
        order = order[num_targets[order] > 0]
        filled = tuple(length for length in lengths if length <= num_targets.max(initial=0))
        longest = filled[-1] if filled else lengths[-1]
        is_long = num_targets[order] >= longest
        long = order[is_long][:num_documents].tolist() if filled else []
        ends = [(index, int(num_targets[index])) for index in long]
        contexts = [DocumentPart(index, end - length, end) for index, end in ends for length in filled]
        shorter = order[~is_long]
        bucket_of = np.frexp(num_targets[shorter] - 1)[1]  # 2 to this power is at least the length
        others = [
            DocumentPart(index, 0, int(num_targets[index]))
            for bucket in np.unique(bucket_of).tolist()
            for index in shorter[bucket_of == bucket][:num_documents].tolist()
        ]
        return cls(filled, tuple(DocumentPart(index, 0, longest) for index in long), tuple(contexts), tuple(others))

    @property
    def parts(self) -> tuple[DocumentPart, ...]:
        """All streams, in the order that `bin` wants their losses in."""
        return self.long + self.contexts + self.others

    def streams(self, documents: Documents) -> list[Int32[np.ndarray, " n+1"]]:
        """The tokens of all parts, of which the first is no target."""
        return [documents.stream(part.document, part.start, part.stop + 1) for part in self.parts]

    def weights(self, documents: Documents) -> list[Float32[np.ndarray, " n"]]:
        """The weights of all parts' targets."""
        return [documents.weights(part.document, part.start, part.stop - part.start) for part in self.parts]

    def bin(
        self,
        nats: Sequence[Float32[np.ndarray, " n"]],
        weights: Sequence[Float32[np.ndarray, " n"]],
        shortest: int,
    ) -> list[Line]:
        """Means over bins, as lines of the results.

        Args:
          nats: losses of each part's targets.
          weights: of the same targets.
          shortest: the short context that the guard is measured at.
        """
        terms = [
            np.stack([np.multiply(loss, weight, dtype=np.float64), np.abs(weight)], axis=1)
            for loss, weight in zip(nats, weights, strict=True)
        ]
        of_long, num_contexts = terms[: len(self.long)], len(self.contexts)
        of_contexts = terms[len(self.long) :][:num_contexts]
        of_others = terms[len(self.long) + num_contexts :]
        lines = [
            _line("loss_by_position", high, [each[low:high] for each in of_long])
            for low, high in _position_bins(max((part.stop for part in self.long), default=0))
        ]
        for length in self.lengths:
            ends = [each for each in of_contexts if len(each) == length]
            # The same tokens at every length, each with half of the shortest context at least.
            num_last = min(NUM_LAST, -(-self.lengths[0] // 2))
            lines.append(_line("loss_of_last_tokens", length, [each[-num_last:] for each in ends]))
        whole = [*of_others, *of_long]
        buckets = [1 << (len(each) - 1).bit_length() for each in whole]
        for bucket in sorted(set(buckets)):
            members = [each for each, its in zip(whole, buckets, strict=True) if its == bucket]
            lines.append(_line("loss_by_document_length", bucket, members))
        return [*lines, _line("short_context_loss", shortest, [each[:shortest] for each in whole])]


def _position_bins(longest: int) -> list[tuple[int, int]]:
    """Bins [low, high) of positions, whose ends are powers of two.

    >>> _position_bins(80)
    [(0, 16), (16, 32), (32, 64), (64, 80)]
    """
    edges = [0]
    while edges[-1] < longest:
        edges.append(min(max(2 * edges[-1], _FIRST_EDGE), longest))
    return list(itertools.pairwise(edges))


def _line(kind: str, length: int, terms: Sequence[Float64[np.ndarray, "n 2"]]) -> Line:
    """A mean over targets, of each of which there is its loss times its weight, and the weight's absolute value."""
    joined = np.concatenate([np.zeros((0, 2)), *terms])
    total, weight_sum = joined.sum(0)
    num_tokens = int(np.count_nonzero(joined[:, 1]))
    return Line(
        kind,
        length,
        loss=float(total / weight_sum) if num_tokens else None,
        num_tokens=num_tokens,
        num_examples=len(terms),
    )
