"""The entropy of single tokens: the best loss of a model that ignores context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from trainer.data.documents import Documents

_NUM_WINDOWS = 1024
_TOKENS_COUNTED_AT_ONCE = 2**20


@dataclass(frozen=True)
class UnigramEstimate:
    """Entropy of the distribution of targets, the tokens that end documents among them.

    Args:
        nats_per_token: the entropy.
        num_tokens: targets that it was counted on.
    """

    nats_per_token: float
    num_tokens: int


def estimate_unigram_entropy(documents: Documents, vocab_size: int, max_tokens: int = 2**26) -> UnigramEstimate:
    """Entropy of the targets; exact up to `max_tokens` of them. Arguments are as in `count_targets`."""
    return estimate_of_mixture([(1.0, count_targets(documents, vocab_size, max_tokens))])


def estimate_of_mixture(sources: Sequence[tuple[float, Int64[np.ndarray, " V"]]]) -> UnigramEstimate:
    """Entropy of the targets of several sources.

    Args:
        sources: of each, its share of the targets and how often each token is a target in it. The shares sum to 1.
    """
    probabilities = sum(share * (counts / max(counts.sum(), 1)) for share, counts in sources)
    probabilities = probabilities[probabilities > 0]
    num_tokens = sum(int(counts.sum()) for _, counts in sources)
    return UnigramEstimate(float(-(probabilities * np.log(probabilities)).sum()), num_tokens)


def count_targets(documents: Documents, vocab_size: int, max_tokens: int = 2**26) -> Int64[np.ndarray, " V"]:
    """How often each token is a target whose weight isn't 0.

    Beyond `max_tokens` targets it is counted on 1024 evenly spaced windows of as many targets in all, so that a corpus
    of any size opens in about the same time.

    Args:
        documents: at least one.
        vocab_size: V; ids are below it.
        max_tokens: targets counted at most.
    """
    ends = np.cumsum(documents.num_targets)
    total = int(ends[-1])
    if total <= max_tokens:
        windows = [(0, total)]
    else:
        width = max(max_tokens // _NUM_WINDOWS, 1)
        windows = [(start, start + width) for start in np.linspace(0, total - width, _NUM_WINDOWS, dtype=np.int64)]
    counts = np.zeros(vocab_size, np.int64)
    for start, stop in windows:
        for part in range(int(start), int(stop), _TOKENS_COUNTED_AT_ONCE):
            tokens = _targets(documents, ends, part, min(part + _TOKENS_COUNTED_AT_ONCE, int(stop)))
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def _targets(documents: Documents, ends: Int64[np.ndarray, " D"], start: int, stop: int) -> np.ndarray:
    """Those of the targets [start, stop) of all documents' targets, laid end to end, whose weight isn't 0."""
    parts = []
    document = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        first = int(ends[document - 1]) if document else 0
        part_stop = min(stop, int(ends[document]))
        tokens = documents.stream(document, start - first + 1, part_stop - first + 1)
        parts.append(tokens[documents.weights(document, start - first, part_stop - start) != 0])
        start, document = part_stop, document + 1
    return np.concatenate(parts)
