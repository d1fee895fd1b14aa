"""Bounds by the field's names: prefix trees, prefixes, image blocks, windows and documents.

Each function takes NumPy's arrays on the host or JAX's, also under `jax.jit`, and returns bounds of the same kind. It
checks the values of NumPy's arrays. It can't check those of JAX's.

Dimensions: B batch, T tokens, D documents, M nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.masks.bounds import Bounds
from kernels.masks.intervals import Integers, array_namespace

_ArrayLike = Array | np.ndarray


def tree_bounds_of_ends(ends: Int[_ArrayLike, "*B T"]) -> Bounds:
    """A prefix tree: each token attends to itself and to its ancestors. For `CausalMask()`, on indices.

    The tokens stand in depth-first order: a prompt, its first completion, its second one, and so on. Where the mask is
    evaluated on positions that restart at each branch, add `q_start=arange(T)`, so that no token sees a later branch.

    Args:
      ends: for each token, the index behind its subtree's last token.

    Returns:
      `q_end`.

    Raises:
      ValueError: ends that aren't integers, or, on the host, don't nest.

    A prompt of two tokens, with completions of two and of one:

    >>> tree_bounds_of_ends([5, 5, 4, 4, 5]).q_end.tolist()
    [5, 5, 4, 4, 5]
    >>> tree_bounds_of_ends([3, 4, 4, 4])
    Traceback (most recent call last):
    ValueError: ends[1]=4 is past ends[0]=3, the end of the subtree that token 1 lies in; expected subtrees that nest
    """
    q_end = _integers("ends", ends)
    if isinstance(q_end, np.ndarray):
        _check_ends(q_end)
    return Bounds(q_end=q_end)


def tree_bounds_of_parents(
    parents: Int[_ArrayLike, "*B M"], node_lengths: Int[_ArrayLike, "*B M"] | None = None, length: int | None = None
) -> Bounds:
    """A prefix tree from each node's parent. For `CausalMask()`; see `tree_bounds_of_ends`.

    Args:
      parents: index of each node's parent, −1 for a root. The nodes stand in depth-first order.
      node_lengths: tokens of each node, 0 for one that isn't there; None: a node is a token.
      length: T, if there are node lengths. Tokens behind the last node are padding, a tree of their own.

    Returns:
      `q_end`.

    Raises:
      ValueError: arguments that aren't integers of these shapes; on the host, parents that make a circle or stand in
        another order, and node lengths below 0 or of more than T tokens.

    >>> tree_bounds_of_parents([-1, 0, 0], node_lengths=[2, 2, 1], length=6).q_end.tolist()
    [5, 5, 4, 4, 5, 6]
    >>> tree_bounds_of_parents([-1, 2, 1])
    Traceback (most recent call last):
    ValueError: parents[1]=2 doesn't stand before its child 1: the parents make a circle or aren't in depth-first order
    """
    parents = _integers("parents", parents)
    if isinstance(parents, np.ndarray):
        _check_parents(parents)
    last = _last_of_subtree(parents)
    if node_lengths is None:
        return Bounds(q_end=last + 1)
    node_lengths = _integers("node_lengths", node_lengths)
    if node_lengths.shape != parents.shape:
        raise ValueError(f"node_lengths {node_lengths.shape} and parents {parents.shape} must have the same shape")
    ends, node = _pieces("node_lengths", node_lengths, length)
    xp = array_namespace(parents, ends)
    # The padding's node comes last, and ends with the sequence.
    ends_of_subtrees = xp.take_along_axis(ends, last, -1)
    ends_of_subtrees = xp.concatenate([ends_of_subtrees, xp.full((*ends.shape[:-1], 1), length, np.int32)], -1)
    return Bounds(q_end=xp.take_along_axis(ends_of_subtrees, node, -1))


def prefix_bounds(
    prefix_lengths: Int[_ArrayLike, "*B D"],
    segment_ids: Int[_ArrayLike, "*B T"] | None = None,
    *,
    document_lengths: Int[_ArrayLike, "*B D"] | None = None,
    length: int | None = None,
) -> Bounds:
    """A prefix language model: each document's first tokens see one another, the others look back. For no mask.

    Args:
      prefix_lengths: tokens of each document's prefix, in the order of the documents; of one longer than its document,
        the document's. Documents behind the last of them have none.
      segment_ids: document of each token. A document is a run of equal ids.
      document_lengths: tokens of each document, in the place of segment ids.
      length: T, if there are document lengths. Tokens behind the last document are padding, a document of their own.

    Returns:
      `k_start` and `k_end`: tokens attend within their document, also without segment ids beside the bounds.

    Raises:
      ValueError: arguments that aren't integers of these shapes; on the host, lengths below 0 or documents of more than
        T tokens.

    >>> prefix_bounds([2, 0], document_lengths=[3, 2], length=5).allowed(5, 5).astype(int).tolist()
    [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    """
    prefix_lengths = _integers("prefix_lengths", prefix_lengths)
    _check_lengths("prefix_lengths", prefix_lengths)
    documents = _documents(segment_ids, document_lengths, length)
    xp, batch = array_namespace(prefix_lengths, *documents), documents.index.shape[:-1]
    num_prefixes = prefix_lengths.shape[-1]
    prefix_lengths = xp.broadcast_to(prefix_lengths, (*batch, num_prefixes))
    prefix_lengths = xp.concatenate([prefix_lengths, xp.zeros((*batch, 1), np.int32)], -1)
    prefix = xp.take_along_axis(prefix_lengths, xp.minimum(documents.index, num_prefixes), -1)
    prefix = xp.minimum(prefix, documents.end - documents.start)
    return Bounds(k_start=documents.start, k_end=xp.maximum(_arange(prefix) + 1, documents.start + prefix))


def block_bounds(block_ids: Int[_ArrayLike, "*B T"], left: Integers | None = None) -> Bounds:
    """Blocks whose tokens see one another, such as images, among tokens that look back. For no mask.

    With a window, the tokens of a block still see all of it, as in Gemma 3's local layers.

    Args:
      block_ids: 0 or less for text. A block is a run of equal ids above 0.
      left: how many tokens before its own a token sees, at least; None: all. A number, or one for each of the batch.

    Returns:
      `k_end`, and `k_start` for a window.

    Raises:
      ValueError: arguments that aren't integers.

    >>> block_bounds([0, 7, 7, 0], left=1).allowed(4, 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    block_ids = _integers("block_ids", block_ids, cast=False)
    blocks = _runs(block_ids)
    xp, index = array_namespace(block_ids), _arange(block_ids)
    k_end = xp.where(block_ids > 0, blocks.end, index + 1)
    if left is None:
        return Bounds(k_end=k_end)
    window = window_bounds(left, block_ids.shape[-1])
    xp = array_namespace(block_ids, window.k_start)
    return Bounds(xp.where(block_ids > 0, xp.minimum(blocks.start, window.k_start), window.k_start), k_end)


def window_bounds(left: Integers, length: int) -> Bounds:
    """A sliding window whose width is data. For `CausalMask()`: together they are `LocalMask(left, 0)`.

    Args:
      left: how many tokens before its own a token sees: W − 1 for the last W tokens. A number, or one for each of the
        batch.
      length: T.

    Returns:
      `k_start`.

    Raises:
      ValueError: a width that isn't an integer.

    >>> window_bounds(1, 4).k_start.tolist()
    [-1, 0, 1, 2]
    """
    left = _integers("left", left)
    xp = array_namespace(left)
    index = xp.arange(length, dtype=np.int32)
    # Wider ones allow what these allow, and stay within int32.
    return Bounds(k_start=index - left.clip(-length, length)[..., None])


def document_bounds(
    segment_ids: Int[_ArrayLike, "*B T"] | None = None,
    *,
    document_lengths: Int[_ArrayLike, "*B D"] | None = None,
    length: int | None = None,
) -> Bounds:
    """Packed documents, each a run of tokens that see no other's. For any mask.

    Args:
      segment_ids: document of each token. A document is a run of equal ids.
      document_lengths: tokens of each document, in the place of segment ids.
      length: T, if there are document lengths. Tokens behind the last document are padding, a document of their own.

    Returns:
      `k_start` and `k_end`.

    Raises:
      ValueError: arguments that aren't integers of these shapes; on the host, lengths below 0 or of more than T tokens.

    >>> bounds = document_bounds(document_lengths=[2, 0, 1], length=4)
    >>> bounds.k_start.tolist(), bounds.k_end.tolist()
    ([0, 0, 2, 3], [2, 2, 3, 4])
    """
    documents = _documents(segment_ids, document_lengths, length)
    return Bounds(documents.start, documents.end)


class _Runs(NamedTuple):
    """For each token, the run of tokens that it lies in.

    Attributes:
      index: which run of the sequence.
      start, end: its first token's index, and the one behind its last.
    """

    index: Any
    start: Any
    end: Any


def _documents(segment_ids: Any, document_lengths: Any, length: int | None) -> _Runs:
    if (segment_ids is None) == (document_lengths is None):
        raise ValueError("give segment_ids or document_lengths, and not both")
    if document_lengths is None:
        return _runs(_integers("segment_ids", segment_ids, cast=False))
    _, index = _pieces("document_lengths", _integers("document_lengths", document_lengths), length)
    return _runs(index)._replace(index=index)  # documents without tokens count


def _runs(ids: Int[_ArrayLike, "*B T"]) -> _Runs:
    """The runs of equal ids."""
    xp, index, length = array_namespace(ids), _arange(ids), ids.shape[-1]
    begins = xp.concatenate([xp.ones_like(ids[..., :1], dtype=bool), ids[..., 1:] != ids[..., :-1]], -1)
    ends = xp.concatenate([begins[..., 1:], xp.ones_like(begins[..., :1])], -1)
    start = _running_maximum(xp.where(begins, index, 0))
    end = length - _running_maximum(xp.where(ends, length - 1 - index, 0)[..., ::-1])[..., ::-1]
    return _Runs(xp.cumsum(begins, -1, dtype=np.int32) - 1, start, end)


def _running_maximum(numbers: Any) -> Any:
    if isinstance(numbers, np.ndarray):
        return np.maximum.accumulate(numbers, axis=-1)
    return jax.lax.cummax(numbers, axis=numbers.ndim - 1)


def _pieces(name: str, lengths: Int[_ArrayLike, "*B D"], length: int | None) -> tuple[Any, Any]:
    """The index behind the last token of each piece, and the piece of each token: D behind the last."""
    if length is None:
        raise ValueError(f"{name} need length=, the number of tokens in a sequence")
    _check_lengths(name, lengths)
    if isinstance(lengths, np.ndarray) and (total := int(lengths.sum(-1, dtype=np.int64).max(initial=0))) > length:
        raise ValueError(f"{name} sum to {total}, more than length={length}; drop some, or lengthen the sequence")
    xp = array_namespace(lengths)

    def of_a_sequence(ends: Any) -> Any:
        return xp.searchsorted(ends, xp.arange(length, dtype=np.int32), side="right").astype(np.int32)

    ends = xp.cumsum(lengths, -1, dtype=np.int32)
    return ends, xp.vectorize(of_a_sequence, signature="(d)->(t)")(ends)


def _last_of_subtree(parents: Int[_ArrayLike, "*B M"]) -> Any:
    """The last node of each node's subtree: its last child's last child, and so on."""
    num_nodes = parents.shape[-1]

    def of_a_tree(parents: Any) -> Any:
        index = _arange(parents)
        if isinstance(parents, np.ndarray):
            last = index.copy()
            np.maximum.at(last, parents[parents >= 0], index[parents >= 0])
        else:
            last = index.at[jnp.where(parents < 0, num_nodes, parents)].max(index, mode="drop")
        for _ in range(num_nodes.bit_length()):  # each step doubles the generations that are passed
            last = last[last]
        return last

    return array_namespace(parents).vectorize(of_a_tree, signature="(m)->(m)")(parents)


def _arange(tokens: Any) -> Any:
    return array_namespace(tokens).arange(tokens.shape[-1], dtype=np.int32)


def _integers(name: str, integers: Any, *, cast: bool = True) -> Any:
    """Integers as an array, by default of int32; those beyond it as its lowest or highest."""
    integers = integers if isinstance(integers, jax.Array) else np.asarray(integers)
    if not jnp.issubdtype(integers.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {integers.dtype}{integers.shape}")
    if not cast:
        return integers
    own, int32 = jnp.iinfo(integers.dtype), np.iinfo(np.int32)
    return integers.clip(max(int(own.min), int32.min), min(int(own.max), int32.max)).astype(np.int32)


def _check_lengths(name: str, lengths: Any) -> None:
    if isinstance(lengths, np.ndarray) and (lengths < 0).any():
        place = tuple(np.argwhere(lengths < 0)[0])
        raise ValueError(f"{name}[{_shown(place)}]={lengths[place]} must be at least 0")


def _check_ends(ends: Int[np.ndarray, "*B T"]) -> None:
    for place, row in _sequences(ends):
        is_behind = row > _arange(row)
        if not is_behind.all():
            token = int(np.argmin(is_behind))
            raise ValueError(
                f"ends[{_shown((*place, token))}]={row[token]} must be at least {token + 1}, the index behind the token"
            )
        open_at: list[int] = []  # a token of each subtree that holds the next one
        for token in np.flatnonzero(np.diff(row, prepend=-1)).tolist():
            while open_at and row[open_at[-1]] <= token:
                open_at.pop()
            if open_at and row[token] > row[open_at[-1]]:
                outer = open_at[-1]
                raise ValueError(
                    f"ends[{_shown((*place, token))}]={row[token]} is past ends[{_shown((*place, outer))}]={row[outer]}"
                    f", the end of the subtree that token {token} lies in; expected subtrees that nest"
                )
            open_at.append(token)


def _check_parents(parents: Int[np.ndarray, "*B M"]) -> None:
    for place, row in _sequences(parents):
        path: list[int] = []  # from a root to the node before
        for node, parent in enumerate(row.tolist()):
            while path and path[-1] != parent:
                path.pop()
            if parent >= 0 and not path:
                given = f"parents[{_shown((*place, node))}]={parent}"
                if parent >= node:
                    raise ValueError(
                        f"{given} doesn't stand before its child {node}: the parents make a circle or aren't in "
                        "depth-first order"
                    )
                raise ValueError(
                    f"{given}, but node {node - 1} before it isn't of the subtree of {parent}; put the nodes in "
                    "depth-first order"
                )
            path.append(node)


def _sequences(array: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Each sequence of a batch, and its place in the batch."""
    return ((place, array[place]) for place in np.ndindex(array.shape[:-1]))


def _shown(place: tuple[int, ...]) -> str:
    return ", ".join(map(str, place))
