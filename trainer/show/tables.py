"""Tables of the documents in the first batches, by source and by length.

Shapes: T tokens in a sequence, D documents of the corpus, P segments, G groups of documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from trainer.config import DataConfig
from trainer.data import Corpus
from trainer.data.mixture import LENGTHS

_TITLES = ("all documents", "all tokens", "documents", "targets", "share", "counted", "loss weight")
_NOTHING = "–"


class DocumentCounts:
    """Counts documents, targets and the weights of their losses, for groups of the corpus's documents.

    Args:
        names: [G] of the groups.
        group_of: [D] the group of each document.
        num_targets: [D] of the documents.
    """

    def __init__(self, names: Sequence[str], group_of: Int64[np.ndarray, " D"], num_targets: Int64[np.ndarray, " D"]):
        self.names, self.group_of = names, group_of
        self._of_corpus = [np.bincount(group_of, weights, len(names)) for weights in (None, num_targets)]
        self._in_batches: Float64[np.ndarray, "4 G"] = np.zeros((4, len(names)))

    def add(self, arrays: Mapping[str, Shaped[np.ndarray, " T"]], documents: Int64[np.ndarray, " P"]) -> None:
        """Counts the segments of one sequence."""
        segments = arrays["segment_ids"]
        weights = np.abs(arrays["weights"][segments > 0].astype(np.float64))
        of_segments = self.group_of[documents]
        of_targets = of_segments[len(documents) - segments[segments > 0]]  # segments count down
        counted = ((of_segments, None), (of_targets, None), (of_targets, weights != 0), (of_targets, weights))
        self._in_batches += [np.bincount(groups, values, len(self.names)) for groups, values in counted]

    def row(self, group: int) -> list[str]:
        """The cells of a group: its name, and the numbers that `_TITLES` names."""
        num_documents, num_targets, num_counted, weight = self._in_batches[:, group]
        _, all_targets, _, all_weight = self._in_batches.sum(axis=1)
        of_corpus = [f"{counts[group]:,.0f}" for counts in self._of_corpus]
        shares = (_percent(num_targets, all_targets), _percent(weight, all_weight))
        counts = [f"{num_documents:,.0f}", f"{num_targets:,.0f}", shares[0], f"{num_counted:,.0f}", shares[1]]
        return [self.names[group], *of_corpus, *counts]


class BatchTables:
    """The tables of some batches, each with what the corpus has to train on beside it.

    Args:
        corpus: of the batches.
        data: its settings, in the phase of the batches.
    """

    def __init__(self, corpus: Corpus, data: DataConfig):
        sources = corpus.sources or {data.source: corpus}
        self._weights = {source.name: source.weight for source in data.sources}
        num_targets = np.maximum(corpus.train.num_targets, 0)
        source_of = np.repeat(np.arange(len(sources)), [len(each.train) for each in sources.values()])
        length_of = np.searchsorted(LENGTHS, num_targets, side="right") - 1
        self._num_of_length = np.bincount(length_of, minlength=len(LENGTHS))
        self._by_source = DocumentCounts([*sources], source_of, num_targets)
        self._by_length = DocumentCounts([*map(_name_length, range(len(LENGTHS)))], length_of, num_targets)

    def add(self, arrays: Mapping[str, Shaped[np.ndarray, " T"]], documents: Int64[np.ndarray, " P"]) -> None:
        """Counts the documents of one sequence."""
        self._by_source.add(arrays, documents)
        self._by_length.add(arrays, documents)

    def source_of(self, document: int) -> str:
        """The name of the source that a document comes from."""
        return self._by_source.names[self._by_source.group_of[document]]

    def by_source(self) -> list[list[str]]:
        """The cells of the mixture's table; the first row has the titles.

        `wanted` is the share of the targets that the config's weights ask for. `loss weight` is the share of the sum of
        the absolute weights, which the loss is divided by.
        """
        total = sum(self._weights.values())
        rows = [["source", *_TITLES], *(self._by_source.row(group) for group in range(len(self._by_source.names)))]
        wanted = ["wanted", *(_percent(self._weights.get(row[0], 0.0), total) for row in rows[1:])]
        return [[*row[:3], cell, *row[3:]] for row, cell in zip(rows, wanted, strict=True)]

    def by_length(self) -> list[list[str]]:
        """The cells of the lengths' table, without lengths that no document has; the first row has the titles."""
        groups = np.flatnonzero(self._num_of_length).tolist()
        return [["tokens of the document", *_TITLES], *map(self._by_length.row, groups)]


def _name_length(group: int) -> str:
    least = LENGTHS[group]
    return f"{least:,} or more" if least == LENGTHS[-1] else f"{least:,} to {LENGTHS[group + 1] - 1:,}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else _NOTHING
