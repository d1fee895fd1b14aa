"""A packed sequence as texts to read: documents, the branches of trees, and the targets that count.

A position holds a token and the target after it. To read, each target is a token of its own, behind the first token of
its document, which is no target.

Shapes: T tokens in a sequence, L tokens of a text, P segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped

from trainer.data import Tokenizer
from trainer.show.token_text import TokenText, texts_of

# Tokens shown at either end of a text, where many share a sequence and where few do.
_FEWEST_SHOWN, _MOST_SHOWN = 16, 128
_SHOWN_OF_SEQUENCE = 1024  # at either end, over all texts of a sequence


class LeftOut(NamedTuple):
    """Tokens in the middle of a long text that aren't shown."""

    num_tokens: int
    num_counted: int
    """Targets among them that count in the loss."""
    num_spans: int
    """Spans of such targets in a row."""


@dataclass(frozen=True)
class Text:
    """A document, or a branch of a tree from where it leaves the one before it.

    Args:
        segment: of the sequence, from 0.
        branch: of the tree, from 0; always 0 in a document.
        position: tokens of the branch before the text.
        ids: [L] the tokens.
        weights: [L] of the loss on them; NaN: the first of a document is no target.
        before: the last token of what the branch continues, if any.
    """

    segment: int
    branch: int
    position: int
    ids: Int32[np.ndarray, " L"]
    weights: Float32[np.ndarray, " L"]
    before: tuple[int, ...]

    @property
    def is_counted(self) -> Shaped[np.ndarray, " L"]:
        """[L] True for the targets that count in the loss."""
        return np.nan_to_num(self.weights) != 0

    def shown(self, tokenizer: Tokenizer, num_at_ends: int | None) -> list[TokenText | LeftOut]:
        """The text, without its middle if it is long.

        Args:
            tokenizer: of the tokens.
            num_at_ends: tokens to show at either end; None: all.
        """
        num = len(self.ids)
        if num_at_ends is None or num <= 3 * num_at_ends:
            return [*texts_of(tokenizer, self.ids, self.weights, self.before)]
        first, last = num_at_ends, num - num_at_ends
        is_counted = self.is_counted[first:last]
        num_spans = np.count_nonzero(np.diff(is_counted.astype(np.int8), prepend=0) == 1)
        left_out = LeftOut(last - first, int(is_counted.sum()), int(num_spans))
        before = self.ids[max(last - num_at_ends, 0) : last].tolist()
        return [
            *texts_of(tokenizer, self.ids[:first], self.weights[:first], self.before),
            left_out,
            *texts_of(tokenizer, self.ids[last:], self.weights[last:], before),
        ]


@dataclass(frozen=True)
class ReadableSequence:
    """A sequence of a batch, to read.

    Args:
        number: among those of the stream, from 0.
        length: T.
        texts: in order.
        documents: [P] the numbers of the segments' documents, among the corpus's to train on.
    """

    number: int
    length: int
    texts: Sequence[Text]
    documents: Int64[np.ndarray, " P"]

    @classmethod
    def of(
        cls, number: int, arrays: Mapping[str, Shaped[np.ndarray, " T"]], documents: Int64[np.ndarray, " P"]
    ) -> ReadableSequence:
        """Reads a sequence's arrays, as `PackedSequences` makes them."""
        segments, positions = arrays["segment_ids"], arrays["positions"]
        # Segments count down. A branch goes on at a position that it shares with the one before it.
        begins = (np.diff(segments, prepend=0) != 0) | (np.diff(positions, prepend=-1) != 1)
        starts = np.flatnonzero(begins & (segments > 0))
        stops = np.append(starts[1:], np.count_nonzero(segments))
        texts: list[Text] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            segment = len(documents) - int(segments[start])
            token, ids = arrays["tokens"][start], arrays["targets"][start:stop]
            weights = arrays["weights"][start:stop].astype(np.float32)
            if texts and texts[-1].segment == segment:
                last = texts[-1]
                position = int(positions[start]) + 1
                texts.append(Text(segment, last.branch + 1, position, ids, weights, (int(token),)))
            else:
                ids, weights = np.insert(ids, 0, token), np.insert(weights, 0, np.nan)
                texts.append(Text(segment, 0, 0, ids, weights, ()))
        return cls(number, len(segments), texts, documents)

    @property
    def num_targets(self) -> int:
        """Positions that hold a target."""
        return sum(int((~np.isnan(text.weights)).sum()) for text in self.texts)

    @property
    def num_at_ends(self) -> int:
        """Tokens to show at either end of each text, so that the sequence stays readable."""
        return min(max(_SHOWN_OF_SEQUENCE // max(len(self.texts), 1), _FEWEST_SHOWN), _MOST_SHOWN)
