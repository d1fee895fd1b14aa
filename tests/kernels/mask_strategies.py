"""Random masks for property tests."""

import numpy as np
from hypothesis import strategies as st

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    NumpyMask,
    PrefixMask,
    ScheduledWindow,
)


def every_third_key(q_pos, kv_pos):
    return (q_pos + kv_pos) % 3 == 0


_offsets = st.integers(-40, 40)
_bounds = st.none() | st.integers(-5, 60)

interval_leaves = st.one_of(
    st.just(FullMask()),
    st.builds(CausalMask, _offsets),
    st.builds(LocalMask, _bounds, _bounds),
    st.builds(ChunkedCausalMask, st.integers(1, 50)),
    st.builds(PrefixMask, st.integers(0, 120)),
    st.builds(ScheduledWindow, st.just(1), st.integers(1, 60), st.just(1000)),
)

# The interval family: the leaves, and intersections of any number of them.
interval_masks = st.lists(interval_leaves, min_size=1, max_size=4).map(
    lambda leaves: leaves[0] if len(leaves) == 1 else _intersection(leaves)
)


def _intersection(leaves):
    mask = leaves[0]
    for leaf in leaves[1:]:
        mask = mask & leaf
    return mask


def random_numpy_mask(seed: int) -> NumpyMask:
    """A dense mask of blobs, so that EMPTY and FULL tiles occur in it."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((12, 12)) < 0.5
    return NumpyMask(np.kron(coarse, np.ones((25, 25), bool)))


any_masks = st.recursive(
    st.one_of(interval_leaves, st.just(MaskFn(every_third_key)), st.builds(random_numpy_mask, st.integers(0, 2**31))),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=5,
)
