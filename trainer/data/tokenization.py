"""Makes documents of token ids from files of text, in memory or in an entry of the token cache.

An entry holds tokens.bin (the ids of all documents, flat) and documents.npy (their table).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainer.data.documents import DOCUMENT_DTYPE, Documents, TokenizedFiles
from trainer.data.readers import read_documents
from trainer.data.token_cache import Entry, OnProgress, TokenCache, cache_key
from trainer.data.tokenizers import Tokenizer, token_dtype
from trainer.errors import DataError

# Part of every key. It changes with the layout of entries and with the rules by which documents are cut.
_ENTRY_FORMAT = 3
# Text handed to the tokenizer at a time: enough to keep its threads busy, little next to a model.
_CHUNK_BYTES = 4 * 2**20
SECONDS_BETWEEN_REPORTS = 5.0

_Item = TypeVar("_Item")


class TokenizingProgress:
    """Tells every few seconds how far the tokenizing of an entry is.

    Args:
        noun: of what becomes tokens, in the plural.
        on_progress: called with a line.
    """

    def __init__(self, noun: str, on_progress: OnProgress):
        self._noun, self._on_progress, self._reported = noun, on_progress, time.monotonic()

    def report(self, count: int, num_tokens: int) -> None:
        """Tells how much is done, if the last line is old."""
        if time.monotonic() - self._reported > SECONDS_BETWEEN_REPORTS:
            self._reported = time.monotonic()
            self._on_progress(f"tokenized {count:,} {self._noun}, {num_tokens:,} tokens")

    def end(self, count: int, num_tokens: int) -> None:
        """Tells that all is done."""
        self._on_progress(f"tokenized {count:,} {self._noun}, {num_tokens:,} tokens: done")


def document_hash(identity: bytes) -> int:
    """64 bits that place a document in a split: uniform, and the same on every machine."""
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def encode_documents(
    documents: Iterable[tuple[bytes, int]], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokenize documents, given as (text, hash), a chunk at a time.

    Returns:
        For each chunk, in order: its documents' tokens, flat, and their records of `DOCUMENT_DTYPE`, which place
        them in the tokens of all chunks. Documents without tokens are passed over.
    """
    num_tokens = 0
    for chunk in chunks(documents, lambda document: len(document[0])):
        tokens, table = _encode_chunk(chunk, tokenizer)
        table["start"] += num_tokens
        num_tokens += len(tokens)
        # A document may be large: nothing of it waits here until the next one is read.
        chunk.clear()
        encoded = [(tokens, table)]
        del tokens
        yield encoded.pop()


def _encode_chunk(chunk: Sequence[tuple[bytes, int]], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    encoded = tokenizer.encode_documents([text for text, _ in chunk])
    kept = [(len(text), digest, len(ids)) for (text, digest), ids in zip(chunk, encoded, strict=True) if len(ids)]
    table = np.zeros(len(kept), DOCUMENT_DTYPE)
    table["num_bytes"] = [num_bytes for num_bytes, _, _ in kept]
    table["hash"] = np.array([digest for _, digest, _ in kept], np.uint64)
    table["length"] = [length for _, _, length in kept]
    table["start"] = np.cumsum(table["length"]) - table["length"]
    return encoded[0] if len(encoded) == 1 else np.concatenate(encoded), table


def tokenize_files(
    files: Sequence[Path],
    source: str,
    text_field: str,
    tokenizer: Tokenizer,
    cache: TokenCache,
    on_progress: OnProgress,
) -> TokenizedFiles:
    """The documents of text, JSON-lines or Parquet files, tokenized unless the cache has them.

    Args:
        files: the files, in order.
        source: `text`, `jsonl` or `parquet`.
        text_field: where the text is; unused by `text`.
        tokenizer: the tokenizer.
        cache: where tokens are kept.
        on_progress: called with a line when tokenizing starts, every few seconds, and when it ends.

    Raises:
        DataError: a file does not hold what its source promises, or changed while it was read.
    """
    key = cache_key(
        files,
        format=_ENTRY_FORMAT,
        source=source,
        text_field=None if source == "text" else text_field,
        tokenizer=tokenizer.identity,
        delimiters=tokenizer.delimiters,  # text that spells them has other tokens
    )

    def write(folder: Path) -> dict[str, Any]:
        return _write_entry(folder, files, source, text_field, tokenizer, on_progress)

    entry = get_or_tokenize(key, files, tokenizer, cache, write, on_progress)
    tokens = entry.open_tokens("tokens.bin", token_dtype(tokenizer.vocab_size))
    documents = Documents((tokens,), entry.load_array("documents.npy"), tokenizer.delimiters)
    return TokenizedFiles(documents, entry.about["digest"])


def get_or_tokenize(
    key: str,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: TokenCache,
    write: Callable[[Path], dict[str, Any]],
    on_progress: OnProgress,
) -> Entry:
    """The entry of a key. If the cache doesn't have it, `write` writes it into the folder that it is given.

    Raises:
        DataError: a file changed while `write` read it, or as `write`.
    """

    def build(folder: Path) -> dict[str, Any]:
        on_progress(f"tokenizing {count_noun(files, 'file')} with {tokenizer.name} into {cache.directory}")
        before = cache_key(files)
        about = write(folder)
        if cache_key(files) != before:
            raise DataError(f"{files[0]} or one of its {len(files) - 1:,} fellows changed while being read; run again")
        return about

    return cache.get_or_build(key, build)


def _write_entry(
    folder: Path, files: Sequence[Path], source: str, text_field: str, tokenizer: Tokenizer, on_progress: OnProgress
) -> dict[str, Any]:
    digest, tables, num_documents, num_tokens = hashlib.sha256(), [], 0, 0
    progress = TokenizingProgress("documents", on_progress)
    with (folder / "tokens.bin").open("wb") as file:
        for tokens, chunk in encode_documents(_documents_of(files, source, text_field), tokenizer):
            file.write(tokens.data)
            digest.update(tokens.data)
            tables.append(chunk)
            num_documents, num_tokens = num_documents + len(chunk), num_tokens + len(tokens)
            del tokens
            progress.report(num_documents, num_tokens)
    if not num_documents:
        raise DataError(f"{files[0]}: every document in {count_noun(files, 'file')} is empty; add some text")
    table = np.concatenate(tables)
    digest.update(table["length"].tobytes())
    np.save(folder / "documents.npy", table)
    progress.end(num_documents, num_tokens)
    return {"digest": digest.hexdigest()}


def _documents_of(files: Sequence[Path], source: str, text_field: str) -> Iterator[tuple[bytes, int]]:
    for path in files:
        num_documents = 0
        for text in read_documents(path, source, text_field):
            num_documents += 1
            # By content, so that copies of a document land on the same side of the split.
            yield text, document_hash(text)
            del text
        if not num_documents:
            raise DataError(f"{path} holds no documents; remove it or leave it out of data.files")


def chunks(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Lists of as many items as are handed to the tokenizer at a time; `size_of` tells an item's bytes."""
    chunk, size = [], 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        del item
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def count_noun(items: Sequence[Any], noun: str) -> str:
    """The number of items, with their noun.

    >>> count_noun([1, 2], "file")
    '2 files'
    """
    return f"{len(items):,} {noun}{'s' * (len(items) != 1)}"
