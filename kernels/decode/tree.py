"""A tree of new tokens behind a cached sequence: drafts to verify, or completions of one prompt.

A depth-first walk numbers the tree's nodes. The descendants of a node have the numbers of one interval, so that two
comparisons say whether one token is the ancestor of another, in whatever order the tokens were written.

Dimensions: B batch (each element one sequence), M tokens of a tree, T new tokens of a call, W = ⌈T / 32⌉ words
of a set of them, C slots, J blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from kernels.decode.blocks import BlockSummary
from kernels.decode.tokens import integers
from kernels.masks.intervals import array_namespace

_ArrayLike = Array | np.ndarray
_LOWEST, _HIGHEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
_WORD_BITS = 32
_CHAIN = -1  # number of the tokens before the tree


class TokenTree(NamedTuple):
    """Where the newest tokens of each sequence branch. Make one with `TokenTree.of_parents`.

    Each of these tokens sees all tokens before the tree, its own ancestors and itself, as far as a mask allows it. Its
    position is its distance from the sequence's first token along its own branch: masks and rotary embeddings count
    that. The tokens may be written in one call or in many. No token sees those that aren't written yet, and one that is
    written behind the tree's last sees nothing.

    Attributes:
      start: index in the sequence of the tree's first token: the number of tokens that were written before.
      depths: number of each token's ancestors in the tree. Its position is `start` + depth.
      numbers: of each token, in a depth-first walk.
      ends: the number behind those of each token's descendants.
    """

    start: Int[Array, " B"]
    depths: Int[Array, "B M"]
    numbers: Int[Array, "B M"]
    ends: Int[Array, "B M"]

    @staticmethod
    def of_parents(parents: Int[_ArrayLike, "*B M"], start: Int[_ArrayLike, " B"]) -> TokenTree:
        """A tree, or several beside one another, from each token's parent.

        Args:
          parents: index in the tree, 0 to M − 1, of each token's parent, which stands before the token; −1 for a child
            of the token before the tree. In the order in which the tokens are written. May be traced.
          start: number of tokens in each sequence before the tree, such as a `SlabCache`'s `lengths`.

        Raises:
          ValueError: arguments that aren't integers of these shapes, or, on the host, a parent that doesn't stand
            before its child.

        A draft of two tokens, with another choice for the second, behind a sequence of ten:

        >>> TokenTree.of_parents([-1, 0, 0], start=[10]).positions(np.array([[9, 10, 11, 12]])).tolist()
        [[9, 10, 11, 11]]

        Four completions of one prompt, 100 tokens of each, a token of each in one call:

        >>> tree = TokenTree.of_parents(np.maximum(np.arange(400) - 4, -1), start=[1000])
        """
        parents, start = integers("parents", parents), integers("start", start)
        batch = start.shape
        if len(batch) != 1 or parents.shape[:-1] not in ((), batch) or 0 in parents.shape or not parents.ndim:
            raise ValueError(
                f"parents must be integers [B, M] or [M], and start integers [B], got {list(parents.shape)} and "
                f"{list(batch)}"
            )
        if isinstance(parents, np.ndarray):
            _check_parents(parents)
        xp = array_namespace(parents)
        nodes = xp.vectorize(_depths_and_numbers, signature="(m)->(m),(m),(m)")(parents.astype(np.int32))
        shape = (*batch, parents.shape[-1])
        return TokenTree(
            jnp.asarray(start.astype(np.int32)), *(jnp.broadcast_to(jnp.asarray(each), shape) for each in nodes)
        )

    def positions(self, index: Int[Array, "B L"]) -> Int[Array, "B L"]:
        """The positions of tokens, from their indices in the sequence."""
        return self.look_up(index).positions

    def look_up(self, index: Int[Array, "B L"]) -> Nodes:
        """Positions and numbers of tokens, from their indices in the sequence."""
        node = index - self.start[:, None]
        size = self.depths.shape[1]
        # Behind the tree's last token, no token is an ancestor or a descendant.
        is_chain, is_known = node < 0, node < size
        depth, number, end = (
            jnp.take_along_axis(of_nodes, node.clip(0, size - 1), axis=1)
            for of_nodes in (self.depths, self.numbers, self.ends)
        )
        return Nodes(
            jnp.where(is_chain, index, self.start[:, None] + depth),
            jnp.where(is_chain, _CHAIN, jnp.where(is_known, number, _HIGHEST)),
            jnp.where(is_chain, _HIGHEST, jnp.where(is_known, end, _LOWEST)),
        )


class Nodes(NamedTuple):
    """Positions of tokens, their numbers in the tree, and the numbers behind those of their descendants."""

    positions: Int[Array, "B L"]
    numbers: Int[Array, "B L"]
    ends: Int[Array, "B L"]


class SlotTree(NamedTuple):
    """The tree as the queries of one call meet it in the slots of their sequences.

    Attributes:
      positions: of the token in each slot.
      sees: True where the slot's token is an ancestor of a query, or the query's own, or stands before the tree.
    """

    positions: Int[Array, "B C"]
    sees: Bool[Array, "B T C"]

    @staticmethod
    def of(tree: TokenTree, queries: Int[Array, "B T"], slots: Int[Array, "B C"], seen: Bool[Array, "B C"]) -> SlotTree:
        """From the indices in the sequence of the queries and of each slot's token, and whether there is one."""
        nodes, query = tree.look_up(slots), tree.look_up(queries).numbers[..., None]
        is_ancestor = (nodes.numbers[:, None] <= query) & (query < nodes.ends[:, None])
        return SlotTree(nodes.positions, is_ancestor & seen[:, None])

    def take(self, slots: Int[Array, "B c"]) -> SlotTree:
        """The same of some slots; anything for a slot past the end."""
        return SlotTree(
            jnp.take_along_axis(self.positions, slots, axis=1, mode="clip"),
            jnp.take_along_axis(self.sees, slots[:, None], axis=2, mode="clip"),
        )

    def query_sets(self) -> UInt32[Array, "B C W"]:
        """The set of queries that see each slot, as bits."""
        sees = jnp.pad(self.sees, ((0, 0), (0, -self.sees.shape[1] % _WORD_BITS), (0, 0)))
        words = sees.reshape(sees.shape[0], -1, _WORD_BITS, sees.shape[2]).swapaxes(1, 3).astype(jnp.uint32)
        return jnp.bitwise_or.reduce(words << np.arange(_WORD_BITS, dtype=np.uint32)[:, None], axis=2)

    def blocks(self, block_size: int) -> BlockSummary:
        """A summary of each block: what some or all of the queries see."""
        # No query sees the slots that fill up the last block.
        fill = (0, 0), (0, -self.positions.shape[1] % block_size)
        position, some, every = (
            jnp.pad(of_slots, fill).reshape(of_slots.shape[0], -1, block_size)
            for of_slots in (self.positions, self.sees.any(1), self.sees.all(1))
        )
        return BlockSummary(
            jnp.where(some, position, _HIGHEST).min(-1),
            jnp.where(some, position, _LOWEST).max(-1),
            some=some.any(-1),
            every=every.all(-1),
        )


def checked_tree(tree: Any, batch: int, num_new: int) -> TokenTree:
    """The tree of a call; ValueError if it doesn't fit."""
    if not isinstance(tree, TokenTree):
        raise ValueError(f"tree must be a TokenTree, got {type(tree).__name__}; use TokenTree.of_parents")
    if tree.start.shape != (batch,) or tree.depths.shape[1] < num_new:
        raise ValueError(
            f"tree is of {tree.start.shape[0]} sequences and {tree.depths.shape[1]} tokens; expected a tree of "
            f"{batch} sequences, and of at least the {num_new} new tokens of each"
        )
    return tree


def _check_parents(parents: Int[np.ndarray, "*B M"]) -> None:
    wrong = (parents < -1) | (parents >= np.arange(parents.shape[-1]))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0].tolist())
        raise ValueError(
            f"parents[{', '.join(map(str, place))}]={parents[place]} must be from -1 to {place[-1] - 1}: a parent "
            f"stands before its child {place[-1]}, and -1 means the token before the tree"
        )


def _depths_and_numbers(parents: Any) -> tuple[Any, Any, Any]:
    """`depths`, `numbers` and `ends` of one tree.

    A walk around the tree enters each node, then its children, and leaves it. Each node's number is that of the step
    that enters it, and its end that of the step that leaves it.
    """
    xp, size = array_namespace(parents), parents.shape[-1]
    node = xp.arange(size, dtype=np.int32)
    # Siblings stand side by side, in whatever order.
    order = xp.argsort(parents).astype(np.int32)
    parent = parents[order]
    first = xp.searchsorted(parent, node).clip(0, size - 1)  # the first child of each node that has one
    enter_or_leave = xp.where(parent[first] == node, order[first], size + node)
    has_next = xp.concatenate([parent[1:] == parent[:-1], xp.zeros(1, bool)])
    leave_parent = xp.where(parent < 0, 2 * size, size + parent)
    next_step = xp.where(has_next, xp.concatenate([order[1:], order[:1]]), leave_parent)
    after_leaving = next_step[xp.argsort(order)]
    left = _steps_to_end(xp.concatenate([enter_or_leave, after_leaving]))
    depths = _steps_to_end(xp.where(parents < 0, size, parents)) - 1
    return depths, 2 * size - left[:size], 2 * size - left[size:]


def _steps_to_end(successors: Any) -> Any:
    """How many steps each element of a linked list is from the list's end, the index behind the last element."""
    xp, size = array_namespace(successors), successors.shape[-1]
    successors = xp.concatenate([successors, xp.full(1, size, np.int32)]).astype(np.int32)
    steps = xp.where(successors == xp.arange(size + 1, dtype=np.int32), 0, 1).astype(np.int32)
    for _ in range(size.bit_length()):  # each doubles the steps that are passed
        steps, successors = steps + steps[successors], successors[successors]
    return steps[:size]
