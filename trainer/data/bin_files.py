"""The documents of pre-tokenized `.bin` files.

nanoGPT puts the end-of-document token after each document, llm.c before it. Here a document is what lies between two
such tokens, or between one and an end of the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64

from trainer.data.bin_layout import NUM_SAMPLED_TOKENS, describe_assumptions, read_layout
from trainer.data.documents import DOCUMENT_DTYPE, Documents, TokenizedFiles
from trainer.data.errors import DataError
from trainer.data.files import OpenFile, printable
from trainer.data.token_cache import OnProgress, TokenCache, cache_key
from trainer.data.token_files import TokenFile, open_tokens, reopening_files

_ENTRY_FORMAT = 2
_TOKENS_READ_AT_ONCE = 2**24


@dataclass(frozen=True)
class BinFiles(TokenizedFiles):
    """The documents of some `.bin` files.

    Args:
        largest_ids: the largest token id in each file.
    """

    largest_ids: tuple[int, ...]


def open_bin_files(
    files: Sequence[Path], end_of_document_id: int, cache: TokenCache, on_progress: OnProgress
) -> BinFiles:
    """Opens files and finds their documents. The first time, each file is read through once.

    Args:
        files: the files, in order.
        end_of_document_id: the token that separates documents.
        cache: keeps the places of the documents.
        on_progress: called with a line about what is assumed of files without a header, and about each file that is
            read through.

    Raises:
        DataError: a file's header or size is wrong, it holds no documents, or can't be read.
        TrainingFailed: a file changes while it is read.
    """
    open_file = reopening_files()
    tokens = tuple(_open(path, open_file) for path in files)
    key = cache_key(files, format=_ENTRY_FORMAT, source="bin", end_of_document_id=end_of_document_id)
    for file in tokens:
        if not file.is_at_its_path():  # The key would be another file's than the one that was opened.
            raise DataError(f"{file.path} was changed while it was opened; run again")
    samples = {file.path: file[:NUM_SAMPLED_TOKENS] for file in tokens if not file.offset}
    for line in describe_assumptions(samples, end_of_document_id):
        on_progress(line)

    def build(folder: Path) -> dict[str, Any]:
        tables, largest_ids, digest = [], [], hashlib.sha256()
        for number, file in enumerate(tokens):
            on_progress(f"finding the documents of {printable(file.path)} ({len(file):,} tokens)")
            table, largest = _scan(file, end_of_document_id, digest)
            if not len(table):
                raise DataError(
                    f"{file.path} holds no token but end-of-document {end_of_document_id}; leave it out of data.files"
                )
            table["array"] = number
            tables.append(table)
            largest_ids.append(largest)
        table = np.concatenate(tables)
        table["hash"] = _splitmix64(np.arange(len(table), dtype=np.uint64))
        np.save(folder / "documents.npy", table)
        return {"digest": digest.hexdigest(), "largest_ids": largest_ids}

    entry = cache.get_or_build(key, build)
    tokens = tuple(
        dataclasses.replace(file, largest_id=largest)
        for file, largest in zip(tokens, entry.about["largest_ids"], strict=True)
    )
    documents = Documents(tokens, entry.load_array("documents.npy"), end_of_document_id)
    return BinFiles(documents, entry.about["digest"], tuple(entry.about["largest_ids"]))


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
            offset = read_layout(path).num_header_bytes + index * tokens.itemsize
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


def _open(path: Path, open_file: Callable[[Path], OpenFile]) -> TokenFile:
    layout = read_layout(path)
    try:
        tokens = open_tokens(path, layout.dtype, offset=layout.num_header_bytes, open_file=open_file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the file, or leave it out") from error
    if not len(tokens):
        raise DataError(f"{path} has a header but no tokens; leave it out of data.files")
    return tokens


def _scan(tokens: TokenFile, end_of_document_id: int, digest: hashlib._Hash) -> tuple[np.ndarray, int]:
    ends, largest = [], 0
    digest.update(len(tokens).to_bytes(8, "little"))
    for start in range(0, len(tokens), _TOKENS_READ_AT_ONCE):
        part = tokens[start : start + _TOKENS_READ_AT_ONCE]
        ends.append(start + np.flatnonzero(part == end_of_document_id))
        largest = max(largest, int(part.max()))
        digest.update(part.data)
    return _documents_between(np.concatenate(ends), len(tokens)), largest


def _documents_between(ends: Int64[np.ndarray, " E"], num_tokens: int) -> np.ndarray:
    starts = np.concatenate([[0], ends + 1])
    lengths = np.concatenate([ends, [num_tokens]]) - starts
    table = np.zeros(int((lengths > 0).sum()), DOCUMENT_DTYPE)
    table["start"], table["length"], table["num_bytes"] = starts[lengths > 0], lengths[lengths > 0], -1
    return table


def _splitmix64(x: UInt64[np.ndarray, " D"]) -> UInt64[np.ndarray, " D"]:
    # Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195: its output is uniform over consecutive inputs.
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
