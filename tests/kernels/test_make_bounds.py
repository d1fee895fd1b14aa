"""Bounds by the field's names, against their definitions pair by pair: NumPy's, batches, and JAX's under jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    CausalMask,
    block_bounds,
    document_bounds,
    prefix_bounds,
    tree_bounds_of_ends,
    tree_bounds_of_parents,
    window_bounds,
)

BATCH, LENGTH = 3, 17
TYPES = ("int8", "uint16", "int32", "int64")


def pairs(is_allowed) -> np.ndarray:
    """A dense mask from a definition of (batch element, query, key)."""
    return np.array([[[is_allowed(b, q, k) for k in range(LENGTH)] for q in range(LENGTH)] for b in range(BATCH)])


def check(make, arrays, expected, *, causal=False):
    """Bounds of the whole batch, of its first element, and of JAX's arrays under jit allow the expected pairs."""
    static = np.tri(LENGTH, dtype=bool) if causal else True
    of_types = (make(*arrays), make(*(array[0] for array in arrays)), jax.jit(make)(*map(jnp.asarray, arrays)))
    for bounds, allowed in zip(of_types, (expected, expected[0], expected), strict=True):
        assert {bound.dtype for bound in bounds if bound is not None} == {np.dtype("int32")}
        np.testing.assert_array_equal(np.asarray(bounds.allowed(LENGTH, LENGTH)) & static, allowed)
    assert all(isinstance(bound, np.ndarray) for bounds in of_types[:2] for bound in bounds if bound is not None)


def draw_lengths(rng, number):
    """Lengths of a number of pieces, some of them 0, that leave some tokens over or none."""
    cuts = np.sort(rng.integers(0, LENGTH + 1, (BATCH, number)))
    return np.diff(cuts, prepend=0, axis=1).astype(rng.choice(TYPES))


def index_of_lengths(lengths):
    """Which piece each token lies in, one by one."""
    pieces = [[index for index, size in enumerate(row) for _ in range(size)] for row in lengths.tolist()]
    return np.array([row + [lengths.shape[1]] * (LENGTH - len(row)) for row in pieces])


def draw_parents(rng, num_nodes):
    """Trees in depth-first order: a node's parent is on the path to the node before it, or there is none."""
    drawn = []
    for _ in range(BATCH):
        path, parents = [], []
        for node in range(num_nodes):
            keep = int(rng.integers(0, len(path) + 1)) if rng.random() < 0.6 else len(path)
            path = path[:keep]
            parents.append(path[-1] if path else -1)
            path.append(node)
        drawn.append(parents)
    return np.array(drawn)


def is_ancestor(parents, node, other):
    while node not in (other, -1):
        node = parents[node]
    return node == other


@pytest.mark.parametrize("draw", range(3))
def test_trees_of_tokens(rng, draw):
    parents = draw_parents(rng, LENGTH)
    expected = pairs(lambda b, q, k: is_ancestor(parents[b], q, k))
    check(tree_bounds_of_parents, [parents.astype(rng.choice(["int8", "int64"]))], expected, causal=True)
    ends = np.array([[1 + max(np.flatnonzero(of_key)) for of_key in dense.T] for dense in expected])
    check(tree_bounds_of_ends, [ends.astype(rng.choice(TYPES))], expected, causal=True)


@pytest.mark.parametrize("num_nodes", [1, 2, 9, 40])
def test_trees_of_nodes(rng, num_nodes):
    parents, lengths = draw_parents(rng, num_nodes), draw_lengths(rng, num_nodes)
    node, parents_and_padding = index_of_lengths(lengths), np.pad(parents, ((0, 0), (0, 1)), constant_values=-1)
    expected = pairs(lambda b, q, k: k <= q and is_ancestor(parents_and_padding[b], node[b, q], node[b, k]))
    make = functools.partial(tree_bounds_of_parents, length=LENGTH)
    check(make, [parents, lengths], expected, causal=True)


def test_trees_on_positions_that_restart_take_a_start_of_queries(rng):
    parents = draw_parents(rng, LENGTH)
    depth = np.zeros((BATCH, LENGTH), int)
    for b, token in np.ndindex(parents.shape):
        depth[b, token] = 0 if parents[b, token] < 0 else depth[b, parents[b, token]] + 1
    bounds = tree_bounds_of_parents(parents)._replace(q_start=np.arange(LENGTH))
    expected = pairs(lambda b, q, k: is_ancestor(parents[b], q, k))
    on_positions = CausalMask()(depth[:, :, None], depth[:, None])
    np.testing.assert_array_equal(np.asarray(bounds.allowed(LENGTH, LENGTH)) & on_positions, expected)


@pytest.mark.parametrize("draw", range(4))
def test_prefixes_and_documents(rng, draw):
    num_documents = int(rng.integers(1, 8))
    lengths = draw_lengths(rng, num_documents)
    document = index_of_lengths(lengths)
    # Some longer than their documents, some of none, and those of the last documents left out.
    prefixes = rng.integers(0, LENGTH + 3, (BATCH, int(rng.integers(0, num_documents + 1))))
    prefixes[rng.random(prefixes.shape) < 0.3] = 0

    def is_allowed(b, q, k):
        if document[b, q] != document[b, k]:
            return False
        number, start = document[b, q], int(np.argmax(document[b] == document[b, q]))
        return k <= q or (number < prefixes.shape[1] and k - start < prefixes[b, number])

    make = functools.partial(prefix_bounds, length=LENGTH)
    check(lambda *arrays: make(arrays[0], document_lengths=arrays[1]), [prefixes, lengths], pairs(is_allowed))
    expected = pairs(lambda b, q, k: document[b, q] == document[b, k])
    check(lambda lengths: document_bounds(document_lengths=lengths, length=LENGTH), [lengths], expected)

    # By ids, which may come again later. Documents without tokens don't show.
    ids = rng.integers(-3, 3, (BATCH, LENGTH)) * 2**29
    document = np.array([[np.count_nonzero(np.diff(row[: token + 1])) for token in range(LENGTH)] for row in ids])
    check(prefix_bounds, [prefixes, ids], pairs(is_allowed))
    check(document_bounds, [ids], pairs(lambda b, q, k: document[b, q] == document[b, k]))


def test_documents_by_ids_beyond_int32_are_told_apart():
    ids = np.array([5, 5 + 2**32, 5 + 2**33])
    assert document_bounds(ids).k_start.tolist() == [0, 1, 2]


@pytest.mark.parametrize("left", [None, 0, 3, LENGTH - 1, LENGTH, 2**31 - 1])
def test_blocks_are_those_of_gemma_3(rng, left):
    """A causal mask, with a window or without, or else the same block: transformers' `token_type_ids_mask_function`."""
    ids = np.repeat(rng.integers(-1, 4, (BATCH, LENGTH)), rng.integers(1, 5), axis=1)[:, :LENGTH]
    run = np.array([[np.count_nonzero(np.diff(row[: token + 1])) for token in range(LENGTH)] for row in ids])

    def is_allowed(b, q, k):
        in_window = k <= q and (left is None or k >= q - left)
        return in_window or (ids[b, q] > 0 and run[b, q] == run[b, k])

    make = functools.partial(block_bounds, left=left)
    check(make, [ids.astype(rng.choice(["int8", "int64"]))], pairs(is_allowed))
    if left is not None:
        check(block_bounds, [ids, np.full(BATCH, left)], pairs(is_allowed))


@pytest.mark.parametrize("left", [-(2**31), -2, -1, 0, 1, LENGTH - 1, LENGTH, 2**31 - 1, [0, 5, 99]])
def test_windows(left):
    lefts = np.broadcast_to(np.asarray(left), BATCH)
    expected = pairs(lambda b, q, k: q - k <= lefts[b])
    check(functools.partial(window_bounds, length=LENGTH), [lefts], expected)
    np.testing.assert_array_equal(window_bounds(int(lefts[1]), LENGTH).allowed(LENGTH, LENGTH), expected[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tree_bounds_of_parents([-1, 0, 3, 2]), r"parents\[2\]=3 doesn't stand before its child 2: .*circle"),
        (lambda: tree_bounds_of_parents([[-1, 0], [-1, 1]]), r"parents\[1, 1\]=1 doesn't stand before its child 1"),
        (lambda: tree_bounds_of_parents([-1, -1, 0]), r"parents\[2\]=0, but node 1 .* the subtree of 0"),
        (lambda: tree_bounds_of_parents([-1, 0, 0, 1]), r"parents\[3\]=1, but node 2 .* depth-first order"),
        (lambda: tree_bounds_of_parents([-1, 0], [1, 2, 3], 6), r"node_lengths \(3,\) and parents \(2,\)"),
        (lambda: tree_bounds_of_parents([-1, 0], [1, 2]), r"node_lengths need length="),
        (lambda: tree_bounds_of_parents([-1, 0], [3, 4], 6), "node_lengths sum to 7, more than length=6"),
        (lambda: tree_bounds_of_parents([-1, 0], [3, -1], 6), r"node_lengths\[1\]=-1 must be at least 0"),
        (lambda: tree_bounds_of_ends([[2, 2], [2, 1]]), r"ends\[1, 1\]=1 must be at least 2"),
        (lambda: tree_bounds_of_ends([4, 3, 4, 4]), r"ends\[2\]=4 is past ends\[1\]=3, .* nest"),
        (lambda: prefix_bounds([2]), "give segment_ids or document_lengths, and not both"),
        (lambda: prefix_bounds([-2], [1, 1]), r"prefix_lengths\[0\]=-2 must be at least 0"),
        (lambda: document_bounds([1], document_lengths=[1], length=1), "and not both"),
        (lambda: document_bounds(document_lengths=[2**30, 2**30, 2**30], length=9), "sum to 3221225472, more than"),
        (lambda: block_bounds([0.5]), r"block_ids must be integers, got float64\(1,\)"),
        (lambda: window_bounds(1.5, 4), r"left must be integers, got float64\(\)"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
