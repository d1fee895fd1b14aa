"""Segment ids and positions of every integer type: no two documents are taken for one, and no position for another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, LocalMask, dot_product_attention
from kernels.arguments.token_integers import int32_segment_ids

LENGTH = 12
# Equal to one another, and to small ids, in their lower 32 bits.
HASHES = {
    "int64": [1, 1 + 2**32, -1, 2**32 - 1, -(2**63), 0],
    "uint64": [2**63, 0, 2**64 - 1, 2**32 - 1, 2**32, 5],
    "uint32": [2**32 - 1, 0, 2**31, 7],
}


def documents(rng, dtype):
    """Ids of two rows of tokens, several a document, as Python integers; and as NumPy's of a type."""
    ids = rng.choice(np.array(HASHES[dtype], object), (2, LENGTH))
    return ids, ids.astype(dtype)


def assert_same_documents(numbered, ids):
    """Of queries and keys: equal after as before, within each row."""
    for after, before in zip(zip(*map(np.asarray, numbered), strict=True), zip(*ids, strict=True), strict=True):
        np.testing.assert_array_equal(after[0][:, None] == after[1][None], before[0][:, None] == before[1][None])


@pytest.mark.parametrize("key_dtype", HASHES)
@pytest.mark.parametrize("query_dtype", HASHES)
def test_ids_beyond_int32_are_numbered_anew(query_dtype, key_dtype, rng):
    (query, as_query), (key, as_key) = documents(rng, query_dtype), documents(rng, key_dtype)
    numbered = int32_segment_ids(as_query, as_key)
    assert all(ids.dtype == jnp.int32 for ids in numbered)
    assert_same_documents(numbered, (query, key))


def test_runs_of_hashes_are_numbered_in_order(rng):
    """So that a tile's lowest and highest id tell it from other documents' tiles."""
    hashes = np.repeat(rng.choice(2**62, 6, replace=False), 2)[None]
    first, second = int32_segment_ids(hashes, hashes)
    np.testing.assert_array_equal(first, second)
    assert (np.diff(first) >= 0).all()


@pytest.mark.parametrize("dtype", HASHES)
def test_traced_ids_of_wide_types_are_refused(dtype, rng):
    _, as_dtype = documents(rng, dtype)
    with jax.enable_x64(dtype != "uint32"):
        arrays = jnp.asarray(as_dtype)
        assert arrays.dtype == dtype
        with pytest.raises(ValueError, match=rf"query_segment_ids are {dtype} .* some are traced; pass both as int32"):
            jax.eval_shape(int32_segment_ids, arrays, arrays)


def test_known_ids_beside_traced_int32_stay_as_they_are_or_are_refused():
    known, traced = np.array([[1, 2]]), jnp.array([[2, 1, 3]], jnp.int32)
    first, second = jax.jit(lambda ids: int32_segment_ids(known, ids))(traced)
    np.testing.assert_array_equal(first, known)
    np.testing.assert_array_equal(second, traced)
    with pytest.raises(ValueError, match=r"query_segment_ids are int64 and .* some are traced; pass both as int32"):
        jax.eval_shape(lambda ids: int32_segment_ids(known + 2**40, ids), traced)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_hashed_ids_keep_documents_apart(implementation, rng):
    x = jnp.asarray(rng.standard_normal((1, LENGTH, 2, 8)), jnp.float32)
    small = np.repeat([1, 2, 3], LENGTH // 3)
    hashed = np.array([7, 7 + 2**32, -(2**63) + 7])[small - 1]

    def attend(ids):
        return dot_product_attention(
            x, x, x, query_segment_ids=ids, key_value_segment_ids=ids, implementation=implementation
        )

    np.testing.assert_array_equal(attend(hashed), attend(small))
    # Closed over, not an argument: of these JAX makes 32 bits before anybody sees them.
    np.testing.assert_allclose(jax.jit(lambda: attend(hashed))(), attend(small), atol=1e-5)


def test_positions_beyond_int32_are_refused():
    x = jnp.ones((1, LENGTH, 2, 8))

    def attend(positions):
        return dot_product_attention(x, x, x, CausalMask(), query_positions=positions, key_value_positions=positions)

    positions = np.arange(LENGTH)[None]
    attend(positions + 2**31 - LENGTH)
    attend(positions.astype(np.uint64))
    for beyond in (positions + 2**31 - LENGTH + 1, positions - 2**31 - 1, positions.astype(np.uint64) + 2**63):
        message = rf"query_positions reaches from {beyond.min()} to {beyond.max()}, beyond int32; subtract"
        with pytest.raises(ValueError, match=message):
            attend(beyond)
    with jax.enable_x64(True):
        known = jnp.asarray(positions)
        assert known.dtype == jnp.int64
        jax.jit(lambda: attend(known))()
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"query_positions is traced int64.*astype\(jnp.int32\)"):
        jax.eval_shape(attend, jnp.asarray(positions))


def test_positions_from_which_a_reach_leaves_int32_are_refused():
    x = jnp.ones((1, 4, 1, 8))
    for first in (-(2**30) - 1, -(2**31)):
        for dtype in (np.int32, np.int64):
            positions = np.arange(4, dtype=dtype) + dtype(first)
            with pytest.raises(ValueError, match=rf"query_positions reaches down to {first}, below -1073741824, where"):
                dot_product_attention(x, x, x, CausalMask(), query_positions=positions, key_value_positions=positions)
    lowest = np.arange(4) - 2**30
    output = dot_product_attention(x, x, x, LocalMask(2**30, 0), query_positions=lowest, key_value_positions=lowest)
    np.testing.assert_array_equal(output, x)
