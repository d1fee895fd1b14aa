"""Tokenized documents with random access. Their tokens are in memory or in files.

Shapes: D documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from trainer.data.chats import ChatSpans
from trainer.data.token_files import TokenFile, check_tokens
from trainer.errors import DataError

NONE = "none"
"""The value of `data.begin_of_document_token` and `data.end_of_document_token` for no such token."""

# One record for each document. `array` says which token array holds it, `num_bytes` is the size of its
# UTF-8 text (-1: unknown), `hash` decides whether it is held out for validation.
DOCUMENT_DTYPE = np.dtype(
    [("array", "<i4"), ("start", "<i8"), ("length", "<i8"), ("num_bytes", "<i8"), ("hash", "<u8")]
)


class Delimiters(NamedTuple):
    """A document is [begin, …, end] for the model, in training, validation, prompts and samples alike.

    Args:
        begin: id of the first token, which is no target; None: there is none, and the text's first token isn't one.
        end: id of the last token; None: there is none.
    """

    begin: int | None
    end: int | None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens, each once."""
        return tuple(dict.fromkeys(token for token in self if token is not None))

    def __str__(self) -> str:
        begin, end = (() if token is None else (str(token),) for token in self)
        return f"[{', '.join((*begin, '…', *end))}]"


@dataclass(frozen=True)
class Documents:
    """Documents as slices of a few flat token arrays, in memory or in files.

    A document of tokens b0 … bn-1 stands for the stream [begin, b0, …, bn-1, end], in which each token after the first
    is a target. Either delimiter may be absent. A chat holds its delimiters and stands for itself.

    Args:
        arrays: flat arrays of token ids. Those in files are read a slice at a time.
        table: [D] records of `DOCUMENT_DTYPE`.
        delimiters: the tokens begin and end.
        chats: for each array, the weights of its tokens, if they are chats'; shorter than `arrays`: the rest has none.
    """

    arrays: tuple[np.ndarray | TokenFile, ...]
    table: np.ndarray
    delimiters: Delimiters
    chats: tuple[ChatSpans | None, ...] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_targets(self) -> Int64[np.ndarray, " D"]:
        """Targets in each document."""
        num_added = np.where(self.are_chats, 0, sum(token is not None for token in self.delimiters))
        return np.maximum(self.table["length"] + num_added - 1, 0)

    @property
    def are_chats(self) -> Bool[np.ndarray, " D"]:
        """True for the documents that are chats."""
        of_chats = [index for index, spans in enumerate(self.chats) if spans is not None]
        return np.isin(self.table["array"], of_chats)

    @property
    def longest(self) -> int:
        """Targets that follow each other in the longest document."""
        return int(self.num_targets.max(initial=0))

    @property
    def num_tokens(self) -> int:
        """Targets in all documents."""
        return int(self.num_targets.sum())

    @property
    def num_bytes(self) -> int | None:
        """Bytes of text in all documents, or None where the text is unknown."""
        return None if (self.table["num_bytes"] < 0).any() else int(self.table["num_bytes"].sum())

    @classmethod
    def join(cls, parts: Sequence[Documents]) -> Documents:
        """The documents of all parts, in order, sharing the tokens; one or more, of the same delimiters."""
        tables = []
        for part, num_arrays in zip(parts, accumulate((len(part.arrays) for part in parts), initial=0), strict=False):
            tables.append(part.table.copy())
            tables[-1]["array"] += num_arrays
        arrays = tuple(array for part in parts for array in part.arrays)
        chats = tuple(part._spans_of(index) for part in parts for index in range(len(part.arrays)))
        return cls(arrays, np.concatenate(tables), parts[0].delimiters, chats=chats)

    def select(self, chosen: Bool[np.ndarray, " D"]) -> Documents:
        """The chosen documents, sharing the tokens."""
        return dataclasses.replace(self, table=self.table[chosen])

    def within(self, sequence_length: int) -> Documents:
        """The documents as sequences of a length hold them: chats that are longer are cut at a turn, or have no tokens.

        Args:
            sequence_length: targets that fit a sequence.

        Raises:
            DataError: a chat is longer, and is to be refused; names it.
        """
        too_long = np.flatnonzero(self.are_chats & (self.num_targets > sequence_length))
        if not len(too_long):
            return self
        table = self.table.copy()
        for array, spans in enumerate(self.chats):
            own = too_long[table["array"][too_long] == array]
            if spans is None or not len(own):
                continue
            if spans.too_long == "refuse":
                raise DataError(
                    f"{self.place_of(own[0])}: the chat has {table['length'][own[0]]:,} tokens, more than "
                    f"sequence_length={sequence_length:,} holds ({len(own):,} such chats); raise sequence_length, or "
                    "set data.chat.too_long to cut or drop"
                )
            table["length"][own] = spans.cut(table["start"][own], sequence_length + 1)
        table["num_bytes"][too_long] = -1
        return dataclasses.replace(self, table=table)

    def cuts(self, sequence_length: int) -> dict[str, int] | None:
        """The chats that are too long for a sequence, ready for JSON; None: there are no chats. Raises as `within`."""
        if not self.are_chats.any():
            return None
        before, after = self.num_targets, self.within(sequence_length).num_targets
        return {
            "num_chats": int(self.are_chats.sum()),
            "num_chats_cut": int(((after < before) & (after > 0)).sum()),
            "num_chats_dropped": int(((after < before) & (after == 0)).sum()),
            "num_tokens_left_out": int((before - after).sum()),
        }

    def place_of(self, document: int) -> str:
        """The place that a chat was read from, for messages."""
        array, start, _, _, _ = self.table[document].item()
        spans = self._spans_of(array)
        assert spans is not None, "only chats know their places"
        return str(spans.place_of(start))

    def as_texts(self) -> Documents:
        """Documents that are read from their beginnings to their ends, as these are."""
        return self

    def tokens(self, document: int, num_tokens: int | None = None) -> np.ndarray:
        """The first tokens of one document, without delimiters; all of them by default.

        Raises:
            TrainingFailed: they are in a file that has changed since it was opened.
        """
        record = self.table[document]
        start, length = int(record["start"]), int(record["length"])
        return self.arrays[record["array"]][start : start + (length if num_tokens is None else min(num_tokens, length))]

    def stream(self, document: int, start: int, stop: int) -> Int32[np.ndarray, " L"]:
        """Part [start, stop) of one document's stream [begin, b0, …, bn-1, end]; raises as `tokens` does."""
        return self.streams([(document, start, stop)])

    def streams(self, parts: Sequence[tuple[int, int, int]]) -> Int32[np.ndarray, " L"]:
        """Parts (document, start, stop) of several documents' streams, end to end; raises as `tokens` does."""
        begin, end = self.delimiters
        # Where no document's token goes, a delimiter stands.
        flat = np.full(sum(stop - start for _, start, stop in parts), -1 if end is None else end, np.int32)
        offset, from_files = 0, []
        for document, start, stop in parts:
            array, place, length, _, _ = self.table[document].item()
            lead = int(begin is not None and self._spans_of(array) is None)
            first, last = max(start, lead), min(stop, length + lead)
            if begin is not None and start < first:
                flat[offset] = begin
            source, of_flat = self.arrays[array], flat[offset + first - start : offset + last - start]
            if isinstance(source, TokenFile):
                of_flat[:] = source.read(place + first - lead, place + last - lead)
                from_files.append((source, of_flat))
            else:
                of_flat[:] = source[place + first - lead : place + last - lead]
            offset += stop - start
        check_tokens(from_files)
        return flat

    def weights(self, document: int, start: int, length: int) -> Float32[np.ndarray, " L"]:
        """The weights of some of a document's targets.

        Args:
            document: which document.
            start: the first target.
            length: L.
        """
        array, place, _, _, _ = self.table[document].item()
        spans = self._spans_of(array)
        if spans is None:
            return np.ones(length, np.float32)
        return spans.weights(place + start + 1, place + start + 1 + length)  # the first token is no target

    def _spans_of(self, array: int) -> ChatSpans | None:
        return self.chats[array] if array < len(self.chats) else None


@dataclass(frozen=True)
class TokenizedFiles:
    """The documents of some files.

    Args:
        documents: the documents, in the files' order.
        digest: hex digest of their tokens and boundaries.
    """

    documents: Documents
    digest: str


def splitmix64(x: UInt64[np.ndarray, " D"]) -> UInt64[np.ndarray, " D"]:
    """Pseudo-random numbers for numbers, the same ones with every version of NumPy.

    A bijection, uniform over consecutive inputs (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195).
    """
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(count: int, *key: int | str) -> Int64[np.ndarray, " N"]:
    """The numbers below a count in an order that follows from a key, the same one with every version of NumPy.

    Example:
        >>> shuffled(8, 0, "name").tolist()
        [5, 7, 6, 2, 4, 1, 0, 3]
    """
    numbers = splitmix64(np.arange(count, dtype=np.uint64))
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return np.argsort(splitmix64(numbers ^ np.frombuffer(digest, "<u8")[0]), kind="stable")
