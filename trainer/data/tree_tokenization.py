"""Makes trees of token ids from files of JSON-lines, in an entry of the token cache.

An entry holds tokens.bin (the ids of all trees, flat) and the tables documents.npy, trees.npy and nodes.npy.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.documents import DOCUMENT_DTYPE, Delimiters, TokenizedFiles
from trainer.data.token_cache import OnProgress, TokenCache, cache_key
from trainer.data.tokenization import SECONDS_BETWEEN_REPORTS, chunks, count_noun, document_hash, get_or_tokenize
from trainer.data.tokenizers import Tokenizer, token_dtype
from trainer.data.tree_reader import TextTree, read_trees
from trainer.data.trees import NODE_DTYPE, TREE_DTYPE, Trees, are_leaves
from trainer.errors import DataError

# Part of every key. It changes with the layout of entries and with the meaning of the files.
_ENTRY_FORMAT = 1


def tokenize_trees(
    files: Sequence[Path], tokenizer: Tokenizer, cache: TokenCache, on_progress: OnProgress
) -> TokenizedFiles:
    """The trees of JSON-lines files, tokenized unless the cache has them.

    Each text is tokenized by itself, so that completions of one prompt share its tokens.

    Args:
        files: the files, in order.
        tokenizer: the tokenizer.
        cache: where tokens are kept.
        on_progress: called with a line when tokenizing starts, every few seconds, and when it ends.

    Raises:
        DataError: a line holds no tree, or a file changed while it was read.
    """
    key = cache_key(
        files, format=_ENTRY_FORMAT, source="trees", tokenizer=tokenizer.identity, delimiters=tokenizer.delimiters
    )

    def write(folder: Path) -> dict[str, Any]:
        return _write_entry(folder, files, tokenizer, on_progress)

    entry = get_or_tokenize(key, files, tokenizer, cache, write, on_progress)
    tokens = entry.open_tokens("tokens.bin", token_dtype(tokenizer.vocab_size))
    table, trees, nodes = (entry.load_array(f"{name}.npy") for name in ("documents", "trees", "nodes"))
    documents = Trees((tokens,), table, Delimiters(None, None), trees, nodes, tuple(files))
    return TokenizedFiles(documents, entry.about["digest"])


def _write_entry(folder: Path, files: Sequence[Path], tokenizer: Tokenizer, on_progress: OnProgress) -> dict[str, Any]:
    digest, num_tokens, reported = hashlib.sha256(), 0, time.monotonic()
    tables: list[tuple[int, ...]] = []
    trees: list[tuple[int, ...]] = []
    nodes: list[np.ndarray] = []
    with (folder / "tokens.bin").open("wb") as file:
        for chunk in chunks(_trees_of(files), lambda each: sum(len(node.text) for node in each[0].nodes)):
            for (text, file_number), encoded in zip(chunk, _encode(chunk, tokenizer), strict=True):
                tokens, of_tree = _lay_out(text, encoded, tokenizer, f"{files[file_number]}:{text.line}")
                file.write(tokens.data)
                digest.update(tokens.data)
                branches = (of_tree["position"] + of_tree["stop"] - of_tree["first"] - 1)[are_leaves(of_tree)]
                num_bytes = sum(len(node.text) for node in text.nodes)
                # By the prompt, so that trees of one prompt land on the same side of the split.
                tables.append((0, num_tokens, len(tokens), num_bytes, document_hash(text.nodes[0].text)))
                first_node = trees[-1][2] + trees[-1][3] if trees else 0
                counts = len(of_tree), len(branches), branches.sum(), branches.max()
                trees.append((file_number, text.line, first_node, *counts))
                nodes.append(of_tree)
                num_tokens += len(tokens)
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                on_progress(f"tokenized {len(trees):,} trees, {num_tokens:,} tokens")
    all_nodes = np.concatenate(nodes)
    if not all_nodes["weight"].any():
        raise DataError(f"{files[0]}: every token in {count_noun(files, 'file')} has weight 0; give one a weight")
    digest.update(all_nodes.tobytes())
    np.save(folder / "documents.npy", np.array(tables, DOCUMENT_DTYPE))
    np.save(folder / "trees.npy", np.array(trees, TREE_DTYPE))
    np.save(folder / "nodes.npy", all_nodes)
    on_progress(f"tokenized {len(trees):,} trees, {num_tokens:,} tokens: done")
    return {"digest": digest.hexdigest()}


def _trees_of(files: Sequence[Path]) -> Iterator[tuple[TextTree, int]]:
    for number, path in enumerate(files):
        num_trees = 0
        for tree in read_trees(path):
            num_trees += 1
            yield tree, number
        if not num_trees:
            raise DataError(f"{path} holds no trees; remove it or leave it out of data.files")


def _encode(chunk: Sequence[tuple[TextTree, int]], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """For each tree: the tokens of each node's text."""
    encoded = iter(tokenizer.encode_documents([node.text for tree, _ in chunk for node in tree.nodes]))
    for tree, _ in chunk:
        yield [next(encoded) for _ in tree.nodes]


def _lay_out(
    tree: TextTree, encoded: Sequence[np.ndarray], tokenizer: Tokenizer, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """A tree's tokens in depth-first order, with delimiters, and the records of its nodes that have tokens."""
    begin, end = (np.array([] if token is None else [token], encoded[0].dtype) for token in tokenizer.delimiters)
    is_parent = {node.parent for node in tree.nodes}
    parts: list[np.ndarray] = []
    records: list[tuple[Any, ...]] = []
    # The record of each node, or of the nearest before it in its branches where it has no token.
    record_of: list[int] = []
    first = 0
    for number, (node, tokens) in enumerate(zip(tree.nodes, encoded, strict=True)):
        tokens = np.concatenate([begin, tokens] if number == 0 else [tokens])
        if number not in is_parent:
            tokens = np.concatenate([tokens, end])
        if number == 0 and not len(tokens):
            raise DataError(
                f"{place}: its prompt has no token, and no token begins documents: nothing stands before the "
                "completions; give it a text, or set data.begin_of_document_token"
            )
        parent = record_of[node.parent] if number else -1
        if not len(tokens):
            record_of.append(parent)
            continue
        position = records[parent][4] + records[parent][3] - records[parent][2] if number else 0
        record_of.append(len(records))
        parts.append(tokens)
        records.append((parent, 0, first, first + len(tokens), position, node.weight))
        first += len(tokens)
    nodes = np.array(records, NODE_DTYPE)
    nodes["subtree_stop"] = np.arange(len(nodes)) + 1
    for number in range(len(nodes) - 1, 0, -1):
        parent = nodes["parent"][number]
        nodes["subtree_stop"][parent] = max(nodes["subtree_stop"][parent], nodes["subtree_stop"][number])
    return np.concatenate(parts), nodes
