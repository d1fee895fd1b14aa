"""Packs trees into sequences, each token of a tree once.

A tree lies in a sequence in depth-first order. A position of the sequence holds a token and its target, as it does for
documents. The last token of a node has a target in each completion that follows, so it stands before each of them. That
costs a token for each completion of a node but one; every target is there once, and each is computed from the tokens of
its branch alone: those whose subtree it is in.

A tree that is longer than a sequence is split between completions as near to its top as will do. Each part repeats the
tokens before it, as context: their loss counts in the first part alone. A branch isn't cut: a completion without its
prompt is another text.

Shapes: T tokens in a sequence, P parts of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from trainer.data.documents import Documents
from trainer.data.packing import PackedSequences, Pieces, empty_sequence
from trainer.data.trees import Trees, leaves_of


def pack(documents: Documents, sequence_length: int, group_sizes: Sequence[int] | None = None) -> PackedSequences:
    """The packed sequences of documents or trees. Arguments are as in `PackedSequences`, errors as in `within`."""
    kind = PackedTrees if isinstance(documents, Trees) else PackedSequences
    return kind(documents, sequence_length, group_sizes)


class PackedTrees(PackedSequences):
    """Random access to the packed sequences of some trees.

    Items are as those of `PackedSequences`, with a segment for each tree, `positions` that count from 0 in each branch,
    the `weights` of the trees' nodes, and one more array: `q_end` (int32), the index in the sequence behind each
    token's subtree. A piece is a part of a tree, and its `start` the first branch.

    Raises:
        DataError: a branch is longer than a sequence; names its tree.
    """

    documents: Trees

    def document_lengths(self, index: int) -> Int64[np.ndarray, " P"]:
        """The lengths up to each node's end, and, negative, those up to its beginning."""
        lengths = []
        for part in self.pieces_of(index).tolist():
            nodes, is_kept, _ = self._nodes_of(part)
            begins = np.maximum(nodes["position"] - 1, 0)
            ends = nodes["position"] + nodes["stop"] - nodes["first"] - 1
            lengths += [ends[is_kept], -begins[is_kept]]
        found = np.concatenate(lengths)
        return found[found != 0]

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, " T"]]:
        sequence, parts, offset = self.empty_sequence(), self.pieces_of(index).tolist(), 0
        for number, part in enumerate(parts):
            arrays = self._lay_out(part)
            place = slice(offset, offset + len(arrays["tokens"]))
            arrays["q_end"] += offset
            for name, array in arrays.items():
                sequence[name][place] = array
            sequence["segment_ids"][place] = len(parts) - number  # falling, as those of documents
            offset = place.stop
        return sequence

    def empty_sequence(self) -> dict[str, Shaped[np.ndarray, " T"]]:
        return empty_sequence(self.sequence_length) | {"q_end": np.zeros(self.sequence_length, np.int32)}

    def sharing(self) -> dict[str, int]:
        trees, num_parts = self.documents.trees, np.bincount(self.pieces.document, minlength=len(self.documents))
        num_tokens, of_branches = int(self.pieces.length.sum()), int(trees["branch_targets"].sum())
        return {
            "num_trees": len(trees),
            "num_branches": int(trees["num_branches"].sum()),
            "num_tokens": num_tokens,
            "num_tokens_saved": of_branches - num_tokens,
            "num_trees_split": int((num_parts > 1).sum()),
            "num_parts_of_split": int(num_parts[num_parts > 1].sum()),
            "num_tokens_repeated": num_tokens - self.documents.num_tokens,
        }

    def _cut(self) -> Pieces:
        trees, length = self.documents.within(self.sequence_length).trees, self.sequence_length
        parts: list[tuple[int, int, int]] = []
        self._stops: list[int] = []  # the branch behind each part's last
        num_targets_of = self.documents.num_targets
        for tree in range(len(trees)):
            size = int(num_targets_of[tree])
            if size <= length:
                split = [_Part(0, int(trees["num_branches"][tree]), size)] if size else []
            else:
                split = _split(self.documents.nodes_of(tree), length)
            parts += [(tree, part.first, part.length) for part in split]
            self._stops += [part.stop for part in split]
        return Pieces(*np.array(parts, np.int64).reshape(-1, 3).T)

    def _nodes_of(self, part: int) -> tuple[np.ndarray, Bool[np.ndarray, " nodes"], Bool[np.ndarray, " nodes"]]:
        """The nodes of a part's tree, those that the part has, and those of them whose loss counts in it."""
        nodes = self.documents.nodes_of(self.pieces.document[part])
        first, stop = leaves_of(nodes)
        begin, end = self.pieces.start[part], self._stops[part]
        return nodes, (first < end) & (stop > begin), (first >= begin) & (first < end)

    def _lay_out(self, part: int) -> dict[str, Shaped[np.ndarray, " tokens"]]:
        """The arrays of one part; `q_end` counts from its beginning."""
        nodes, is_kept, is_counted = self._nodes_of(part)
        tree = self.documents.tokens(self.pieces.document[part])
        first = np.maximum(nodes["first"], 1)  # the tree's first token is no target
        num_targets = np.where(is_kept, nodes["stop"] - first, 0)
        ends = np.concatenate([[0], np.cumsum(num_targets)])
        node = np.repeat(np.arange(len(nodes)), num_targets)
        target = first[node] + np.arange(len(node)) - ends[node]
        before_node = np.where(nodes["parent"] < 0, 0, nodes["stop"][nodes["parent"]] - 1)
        before = np.where(target == nodes["first"][node], before_node[node], target - 1)
        return {
            "tokens": tree[before],
            "targets": tree[target],
            "positions": nodes["position"][node] + target - nodes["first"][node] - 1,
            "weights": np.where(is_counted, nodes["weight"], 0)[node],
            "q_end": ends[nodes["subtree_stop"]][node],
        }


class _Part(NamedTuple):
    """Branches [first, stop) of a tree, and the targets that they have together."""

    first: int
    stop: int
    length: int


def _split(nodes: np.ndarray, length: int) -> list[_Part]:
    """The parts of a tree, each of the most completions in a row that fit."""
    first, stop = leaves_of(nodes)
    num_tokens = np.concatenate([[0], np.cumsum(nodes["stop"] - nodes["first"])])
    of_subtree = num_tokens[nodes["subtree_stop"]] - num_tokens[:-1]
    before = nodes["position"] - 1  # in targets, those of the branch before the node
    parts: list[_Part] = []
    parent_of_last, number = -1, 0
    while number < len(nodes):
        size = int(of_subtree[number])
        if before[number] + size > length:
            number += 1  # its completions go into parts of their own
            continue
        parent = int(nodes["parent"][number])
        if parts and parent == parent_of_last and parts[-1].length + size <= length:
            parts[-1] = _Part(parts[-1].first, int(stop[number]), parts[-1].length + size)
        else:
            parts.append(_Part(int(first[number]), int(stop[number]), int(before[number]) + size))
        parent_of_last, number = parent, int(nodes["subtree_stop"][number])
    return parts
