"""Makes trees of token ids from files of JSON-lines, in an entry of the token cache.

An entry holds tokens.bin (the ids of all trees, flat) and the tables documents.npy, trees.npy and nodes.npy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.documents import DOCUMENT_DTYPE, Delimiters, TokenizedFiles
from trainer.data.token_cache import OnProgress, TokenCache, cache_key
from trainer.data.tokenization import TokenizingProgress, chunks, count_noun, document_hash, get_or_tokenize
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
    digest, num_tokens, num_nodes, progress = hashlib.sha256(), 0, 0, TokenizingProgress("trees", on_progress)
    number_of = {path: number for number, path in enumerate(files)}
    documents: list[tuple[int, ...]] = []
    trees: list[tuple[int, ...]] = []
    nodes: list[np.ndarray] = []
    with (folder / "tokens.bin").open("wb") as file:
        for chunk in chunks(_trees_of(files), lambda tree: tree.num_bytes):
            for tree, encoded in zip(chunk, _encode(chunk, tokenizer), strict=True):
                tokens, of_tree = _lay_out(tree, encoded, tokenizer)
                file.write(tokens.data)
                digest.update(tokens.data)
                # By the prompt, so that trees of one prompt land on the same side of the split.
                documents.append((0, num_tokens, len(tokens), tree.num_bytes, document_hash(tree.nodes[0].text)))
                branches = (of_tree["position"] + of_tree["stop"] - of_tree["first"] - 1)[are_leaves(of_tree)]
                counts = len(of_tree), len(branches), branches.sum(), branches.max()
                trees.append((number_of[tree.line.path], tree.line.number, num_nodes, *counts))
                nodes.append(of_tree)
                num_tokens, num_nodes = num_tokens + len(tokens), num_nodes + len(of_tree)
            progress.report(len(trees), num_tokens)
    all_nodes = np.concatenate(nodes)
    if not all_nodes["weight"].any():
        raise DataError(f"{files[0]}: every token in {count_noun(files, 'file')} has weight 0; give one a weight")
    digest.update(all_nodes.tobytes())
    np.save(folder / "documents.npy", np.array(documents, DOCUMENT_DTYPE))
    np.save(folder / "trees.npy", np.array(trees, TREE_DTYPE))
    np.save(folder / "nodes.npy", all_nodes)
    progress.end(len(trees), num_tokens)
    return {"digest": digest.hexdigest()}


def _trees_of(files: Sequence[Path]) -> Iterator[TextTree]:
    for path in files:
        num_trees = 0
        for tree in read_trees(path):
            num_trees += 1
            yield tree
        if not num_trees:
            raise DataError(f"{path} holds no trees; remove it or leave it out of data.files")


def _encode(chunk: Sequence[TextTree], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """For each tree: the tokens of each node's text."""
    encoded = iter(tokenizer.encode_documents([node.text for tree in chunk for node in tree.nodes]))
    for tree in chunk:
        yield [next(encoded) for _ in tree.nodes]


def _lay_out(tree: TextTree, encoded: Sequence[np.ndarray], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """A tree's tokens in depth-first order, with delimiters, and the records of its nodes that have tokens."""
    begin, end = (np.array([] if token is None else [token], encoded[0].dtype) for token in tokenizer.delimiters)
    is_parent = {node.parent for node in tree.nodes}
    parts: list[np.ndarray] = []
    records: list[tuple[float, ...]] = []
    # Of each node: its record, or that of the nearest before it in its branches where it has no token; and the tokens
    # of its branches up to its end.
    record_of: list[int] = []
    length_to: list[int] = []
    first = 0
    for number, (node, tokens) in enumerate(zip(tree.nodes, encoded, strict=True)):
        is_prompt = node.parent < 0
        tokens = np.concatenate([*([begin] if is_prompt else []), tokens, *([] if number in is_parent else [end])])
        if is_prompt and not len(tokens):
            raise DataError(
                f"{tree.line}: its prompt has no token, and no token begins documents: nothing stands before the "
                "completions; give it a text, or set data.begin_of_document_token"
            )
        parent, position = (-1, 0) if is_prompt else (record_of[node.parent], length_to[node.parent])
        record_of.append(len(records) if len(tokens) else parent)
        length_to.append(position + len(tokens))
        if len(tokens):
            parts.append(tokens)
            records.append((parent, 0, first, first + len(tokens), position, node.weight))
            first += len(tokens)
    nodes = np.array(records, NODE_DTYPE)
    nodes["subtree_stop"] = np.arange(len(nodes)) + 1
    for record in nodes[:0:-1]:  # children before their parents
        stop = nodes["subtree_stop"]
        stop[record["parent"]] = max(stop[record["parent"]], record["subtree_stop"])
    return np.concatenate(parts), nodes
