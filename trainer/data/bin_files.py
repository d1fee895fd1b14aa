"""The documents of pre-tokenized files.

nanoGPT puts the end-of-document token after each document, llm.c before it. Here a document is what lies between two
such tokens, or between one and an end of the file. A token that begins documents parts them likewise.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from trainer.data.bin_layout import NUM_SAMPLED_TOKENS, BinLayout, describe_assumptions, read_layout
from trainer.data.documents import DOCUMENT_DTYPE, Delimiters, Documents, TokenizedFiles, splitmix64
from trainer.data.files import OpenFile, printable
from trainer.data.token_cache import OnProgress, TokenCache, cache_key
from trainer.data.token_files import TokenFile, open_tokens, reopening_files
from trainer.errors import DataError

_ENTRY_FORMAT = 3
_TOKENS_READ_AT_ONCE = 2**24


@dataclass(frozen=True)
class BinFiles(TokenizedFiles):
    """The documents of some pre-tokenized files.

    Args:
        largest_ids: the largest token id in each file.
        has_delimiters: whether a token that begins or ends documents is in any of them.
    """

    largest_ids: tuple[int, ...]
    has_delimiters: bool


def open_bin_files(
    files: Sequence[Path], delimiters: Delimiters, cache: TokenCache, on_progress: OnProgress
) -> BinFiles:
    """Opens files and finds their documents. The first time, each file is read through once.

    Args:
        files: the files, in order.
        delimiters: the tokens that begin and end documents.
        cache: keeps the bounds of the documents.
        on_progress: called with a line about what is assumed of files without a header, and about each file that is
            read through.

    Raises:
        DataError: a file's header or size is wrong, it holds no documents, or can't be read.
        TrainingFailed: a file changes while it is read.
    """
    open_file = reopening_files()
    layouts = [read_layout(path) for path in files]
    tokens = tuple(_open(path, layout, open_file) for path, layout in zip(files, layouts, strict=True))
    key = cache_key(files, format=_ENTRY_FORMAT, source="bin", delimiters=delimiters)
    for file in tokens:
        if not file.is_at_its_path():  # The key would be another file's than the one that was opened.
            raise DataError(f"{file.path} was changed while it was opened; run again")
    assumed = [file for file, layout in zip(tokens, layouts, strict=True) if layout.is_assumed]
    for line in describe_assumptions({file.path: file[:NUM_SAMPLED_TOKENS] for file in assumed}, delimiters.end):
        on_progress(line)

    def build(folder: Path) -> dict[str, Any]:
        scans, digest = [], hashlib.sha256()
        for number, file in enumerate(tokens):
            on_progress(f"finding the documents of {printable(file.path)} ({len(file):,} tokens)")
            scan = _scan(file, delimiters, digest)
            if not len(scan.table):
                raise DataError(
                    f"{file.path} holds no token but those around documents, {delimiters}; leave it out of data.files"
                )
            scan.table["array"] = number
            scans.append(scan)
        table = np.concatenate([scan.table for scan in scans])
        table["hash"] = splitmix64(np.arange(len(table), dtype=np.uint64))
        np.save(folder / "documents.npy", table)
        return {
            "digest": digest.hexdigest(),
            "largest_ids": [scan.largest_id for scan in scans],
            "has_delimiters": any(scan.has_delimiters for scan in scans),
        }

    entry = cache.get_or_build(key, build)
    largest_ids = tuple(entry.about["largest_ids"])
    tokens = tuple(
        dataclasses.replace(file, largest_id=largest) for file, largest in zip(tokens, largest_ids, strict=True)
    )
    documents = Documents(tokens, entry.load_array("documents.npy"), delimiters)
    return BinFiles(documents, entry.about["digest"], largest_ids, entry.about["has_delimiters"])


def check_ids(files: Sequence[Path], opened: BinFiles, vocab_size: int, remedy: str) -> None:
    """Refuses files with an id that the vocabulary doesn't have.

    Args:
        files: the files that were opened.
        opened: what `open_bin_files` made of them.
        vocab_size: the vocabulary's size.
        remedy: what to do about it, for the message.

    Raises:
        DataError: names the first such token, its file and place.
    """
    for path, tokens, largest in zip(files, opened.documents.arrays, opened.largest_ids, strict=True):
        if largest >= vocab_size:
            index, token = _first_beyond(tokens, vocab_size)
            offset = getattr(tokens, "offset", 0) + index * tokens.itemsize
            raise DataError(
                f"{path}: token {token} at index {index:,} (byte {offset:,}) is outside the vocabulary of "
                f"{vocab_size:,}; the largest in the file is {largest}. {remedy}"
            )


def _first_beyond(tokens: TokenFile | np.ndarray, vocab_size: int) -> tuple[int, int]:
    for start in range(0, len(tokens), _TOKENS_READ_AT_ONCE):
        part = tokens[start : start + _TOKENS_READ_AT_ONCE]
        if part.max() >= vocab_size:
            index = int(np.argmax(part >= vocab_size))
            return start + index, int(part[index])
    raise AssertionError("the largest id was found in this file")


def _open(path: Path, layout: BinLayout, open_file: Callable[[Path], OpenFile]) -> TokenFile:
    try:
        tokens = open_tokens(path, layout.dtype, offset=layout.num_header_bytes, open_file=open_file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the file, or leave it out") from error
    if not len(tokens):
        raise DataError(f"{path} has a header but no tokens; leave it out of data.files")
    return tokens


class _Scan(NamedTuple):
    """Facts that are found by reading a file through."""

    table: np.ndarray
    largest_id: int
    has_delimiters: bool


def _scan(tokens: TokenFile, delimiters: Delimiters, digest: hashlib._Hash) -> _Scan:
    found, largest = [], 0
    digest.update(len(tokens).to_bytes(8, "little"))
    for start in range(0, len(tokens), _TOKENS_READ_AT_ONCE):
        part = tokens[start : start + _TOKENS_READ_AT_ONCE]
        if part.dtype.kind == "i" and part.min() < 0:
            index = int(np.argmax(part < 0))
            raise DataError(
                f"{tokens.path}: token {part[index]} at index {start + index:,} is negative, so no token id"
            )
        for token in delimiters.ids:
            found.append(start + np.flatnonzero(part == token))
        largest = max(largest, int(part.max()))
        digest.update(part.data)
    indices = np.sort(np.concatenate([np.zeros(0, np.int64), *found]))
    return _Scan(_documents_between(indices, len(tokens)), largest, len(indices) > 0)


def _documents_between(indices: Int64[np.ndarray, " E"], num_tokens: int) -> np.ndarray:
    """The documents between the tokens at some indices, which belong to none."""
    starts = np.concatenate([[0], indices + 1])
    lengths = np.concatenate([indices, [num_tokens]]) - starts
    table = np.zeros(int((lengths > 0).sum()), DOCUMENT_DTYPE)
    table["start"], table["length"], table["num_bytes"] = starts[lengths > 0], lengths[lengths > 0], -1
    return table
