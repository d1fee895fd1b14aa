"""Tables of the documents in the first batches, by source and by length.

Shapes: T tokens in a sequence, D documents of the corpus, P segments, G groups of documents.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from trainer.config import DataConfig
from trainer.data import Corpus
from trainer.data.mixture import LENGTHS

_OF_CORPUS = ("all documents", "all tokens")
_IN_BATCHES = ("documents", "targets", "share", "counted", "loss weight")
_NOTHING = "–"


class DocumentCounts:
    """Counts segments, targets and the weights of their losses, for groups of the corpus's documents.

    Args:
        group_of: [D] the group of each document.
        num_groups: G.
    """

    def __init__(self, group_of: Int64[np.ndarray, " D"], num_groups: int):
        self._group_of, self._num_groups = group_of, num_groups
        self.counts: Float64[np.ndarray, "4 G"] = np.zeros((4, num_groups))
        """Segments, targets, those of them that count, and the sum of their absolute weights."""

    def add(self, arrays: Mapping[str, Shaped[np.ndarray, " T"]], documents: Int64[np.ndarray, " P"]) -> None:
        """Counts the segments of one sequence."""
        segments, weights = arrays["segment_ids"], np.abs(arrays["weights"].astype(np.float64))
        is_target = segments > 0
        of_segments = self._group_of[documents]
        of_targets = of_segments[len(documents) - segments[is_target]]  # segments count down
        weights = weights[is_target]
        for index, (groups, values) in enumerate(
            ((of_segments, None), (of_targets, None), (of_targets, weights != 0), (of_targets, weights))
        ):
            self.counts[index] += np.bincount(groups, weights=values, minlength=self._num_groups)

    def cells(self, group: int) -> list[str]:
        """The cells of a group's row, as `_IN_BATCHES`."""
        num_documents, num_targets, num_counted, weight = self.counts[:, group]
        _, all_targets, _, all_weight = self.counts.sum(axis=1)
        shares = (_percent(num_targets, all_targets), _percent(weight, all_weight))
        return [f"{num_documents:,.0f}", f"{num_targets:,.0f}", shares[0], f"{num_counted:,.0f}", shares[1]]


class BatchTables:
    """The tables of some batches, each with what the corpus has to train on beside it.

    Args:
        corpus: of the batches.
        data: its settings, in the phase of the batches.
    """

    def __init__(self, corpus: Corpus, data: DataConfig):
        sources = corpus.sources or {data.source: corpus}
        weights = {source.name: source.weight for source in data.sources}
        self._names = [*sources]
        self._wanted = [
            _percent(weights.get(name, 0.0), sum(weights.values())) if weights else _NOTHING for name in sources
        ]
        num_targets = corpus.train.num_targets
        self._source_of = np.repeat(np.arange(len(sources)), [len(each.train) for each in sources.values()])
        length_of = np.searchsorted(LENGTHS, num_targets, side="right") - 1
        self._of_corpus = [
            [
                (int(count), int(tokens))
                for count, tokens in zip(
                    np.bincount(groups, minlength=num), np.bincount(groups, num_targets, minlength=num), strict=True
                )
            ]
            for groups, num in ((self._source_of, len(sources)), (length_of, len(LENGTHS)))
        ]
        self._by_source = DocumentCounts(self._source_of, len(sources))
        self._by_length = DocumentCounts(length_of, len(LENGTHS))

    def add(self, arrays: Mapping[str, Shaped[np.ndarray, " T"]], documents: Int64[np.ndarray, " P"]) -> None:
        """Counts the documents of one sequence."""
        for counts in (self._by_source, self._by_length):
            counts.add(arrays, documents)

    def source_of(self, document: int) -> str:
        """The name of the source that a document comes from."""
        return self._names[self._source_of[document]]

    def by_source(self) -> list[list[str]]:
        """The cells of the mixture's table; the first row has the titles.

        The share of the targets is what the config's weights ask for. Weights of losses count by their absolute values.
        """
        titles = ["source", *_OF_CORPUS, "wanted", *_IN_BATCHES]
        of_corpus = [[f"{count:,}", f"{tokens:,}"] for count, tokens in self._of_corpus[0]]
        rows = zip(self._names, of_corpus, self._wanted, strict=True)
        return [
            titles,
            *([name, *cells, wanted, *self._by_source.cells(i)] for i, (name, cells, wanted) in enumerate(rows)),
        ]

    def by_length(self) -> list[list[str]]:
        """The cells of the lengths' table, without lengths that no document has; the first row has the titles."""
        titles = ["tokens of the document", *_OF_CORPUS, *_IN_BATCHES]
        return [
            titles,
            *(
                [_name_length(group), f"{count:,}", f"{tokens:,}", *self._by_length.cells(group)]
                for group, (count, tokens) in enumerate(self._of_corpus[1])
                if count
            ),
        ]


def _name_length(group: int) -> str:
    least = LENGTHS[group]
    return f"{least:,} or more" if least == LENGTHS[-1] else f"{least:,} to {LENGTHS[group + 1] - 1:,}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else _NOTHING
