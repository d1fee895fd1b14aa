"""Trees of tokens with random access: documents that share their beginnings.

A tree is a prompt whose completions may go on in several ways. A branch is the way from the prompt to a leaf, and
reads as a document, [begin, prompt, completion, …, end]. The tokens of a tree are stored once each, in depth-first
order: begin and prompt, the first completion, what continues it, and so on; an end behind each leaf.

Shapes: D trees, N nodes of all trees.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from trainer.data.documents import Documents
from trainer.errors import DataError

# Tokens count from the tree's first, nodes from its root. `first` and `stop` bound a node's own tokens, `subtree_stop`
# is the node behind its subtree, and `position` is the index of its first token in its branches.
NODE_DTYPE = np.dtype(
    [
        ("parent", "<i4"),
        ("subtree_stop", "<i4"),
        ("first", "<i8"),
        ("stop", "<i8"),
        ("position", "<i8"),
        ("weight", "<f4"),
    ]
)
# `branch_targets` are those of all branches as documents of their own, `longest_branch` those of the longest.
TREE_DTYPE = np.dtype(
    [
        ("file", "<i4"),
        ("line", "<i8"),
        ("first_node", "<i8"),
        ("num_nodes", "<i4"),
        ("num_branches", "<i8"),
        ("branch_targets", "<i8"),
        ("longest_branch", "<i8"),
    ]
)


@dataclass(frozen=True)
class Trees(Documents):
    """Trees as slices of a few flat token arrays. The delimiters are stored, so `delimiters` has none.

    Each token of a tree but the first is a target, once.

    Args:
        trees: [D] records of `TREE_DTYPE`.
        nodes: [N] records of `NODE_DTYPE`, those of a tree together.
        files: that they were read from.
    """

    trees: np.ndarray
    nodes: np.ndarray
    files: tuple[Path, ...]

    @property
    def longest(self) -> int:
        return int(self.trees["longest_branch"].max(initial=0))

    def select(self, chosen: Bool[np.ndarray, " D"]) -> Trees:
        return dataclasses.replace(self, table=self.table[chosen], trees=self.trees[chosen])

    def within(self, sequence_length: int) -> Trees:
        """These trees, of which none has a branch that is longer than a sequence.

        Raises:
            DataError: one has; names that of the longest.
        """
        if self.longest > sequence_length:
            longest = self.trees["longest_branch"]
            raise DataError(
                f"{self.place_of(int(np.argmax(longest)))}: a branch has {self.longest:,} tokens, more than "
                f"sequence_length={sequence_length:,} ({(longest > sequence_length).sum():,} such trees); raise "
                f"sequence_length to at least {self.longest}, or shorten the prompt or the completion"
            )
        return self

    def as_texts(self) -> Documents:
        """The first branch of each tree, which the tree begins with."""
        table = self.table.copy()
        for tree in range(len(self)):
            nodes = self.nodes_of(tree)
            table["length"][tree] = nodes["stop"][np.argmax(are_leaves(nodes))]
        table["num_bytes"] = -1
        return Documents(self.arrays, table, self.delimiters)

    def nodes_of(self, tree: int) -> np.ndarray:
        """[nodes] The records of one tree's nodes, in depth-first order."""
        first = self.trees["first_node"][tree]
        return self.nodes[first : first + self.trees["num_nodes"][tree]]

    def place_of(self, tree: int) -> str:
        """The file and the line of a tree, for messages."""
        return f"{self.files[self.trees['file'][tree]]}:{self.trees['line'][tree]}"


def leaves_of(nodes: np.ndarray) -> tuple[Int64[np.ndarray, " nodes"], Int64[np.ndarray, " nodes"]]:
    """The branches that go through each node of a tree: the first, and the one behind the last.

    Args:
        nodes: from `Trees.nodes_of`.
    """
    num_before = np.concatenate([[0], np.cumsum(are_leaves(nodes))])
    return num_before[:-1], num_before[nodes["subtree_stop"]]


def are_leaves(nodes: np.ndarray) -> Bool[np.ndarray, " nodes"]:
    """True for the nodes of a tree that nothing continues."""
    return nodes["subtree_stop"] == np.arange(len(nodes)) + 1
