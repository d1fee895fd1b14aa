"""The mask algebra against its definitions: elementwise, by rectangle, as text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    ScheduledWindow,
    TileKind,
    count_allowed_pairs,
    make_block_plan,
    parse_mask,
)
from kernels.masks import require_mask
from kernels.masks.drawing import block_map
from tests.kernels.mask_strategies import any_masks, interval_masks

GROWING = ScheduledWindow(2, 8, 10)

DEFINITIONS = [
    (FullMask(), lambda q, kv: True),
    (CausalMask(), lambda q, kv: kv <= q),
    (CausalMask(7), lambda q, kv: kv <= q + 7),
    (LocalMask(5, 2), lambda q, kv: q - 5 <= kv <= q + 2),
    (LocalMask(None, 2), lambda q, kv: kv - q <= 2),
    (LocalMask(5, None), lambda q, kv: q - 5 <= kv),
    (ChunkedCausalMask(6), lambda q, kv: kv <= q and kv // 6 == q // 6),
    (PrefixMask(9), lambda q, kv: kv < 9),
    (CausalMask() & LocalMask(5, 0), lambda q, kv: q - 5 <= kv <= q),
    (CausalMask() | PrefixMask(9), lambda q, kv: kv <= q or kv < 9),
    (~CausalMask(), lambda q, kv: kv > q),
    (MaskFn(lambda q, kv: (q * kv) % 3 == 1), lambda q, kv: (q * kv) % 3 == 1),
]


@pytest.mark.parametrize(("mask", "definition"), DEFINITIONS, ids=lambda x: repr(x) if not callable(x) else "")
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_masks_follow_their_definitions(mask, definition, xp):
    expected = np.array([[definition(q, kv) for kv in range(30)] for q in range(25)])
    allowed = mask(xp.arange(25)[:, None], xp.arange(30)[None, :])
    assert isinstance(allowed, jax.Array if xp is jnp else np.ndarray)
    np.testing.assert_array_equal(allowed, expected)


@given(mask=any_masks, seed=st.integers(0, 2**31))
def test_classify_never_lies(mask, seed):
    rng = np.random.default_rng(seed)
    q_lo, kv_lo = rng.integers(0, 200, (2, 40))
    q_hi, kv_hi = q_lo + rng.integers(0, 60, 40), kv_lo + rng.integers(0, 60, 40)
    kinds = np.broadcast_to(mask.classify(q_lo, q_hi, kv_lo, kv_hi), 40)
    for kind, *corners in zip(kinds, q_lo, q_hi, kv_lo, kv_hi, strict=True):
        allowed = _dense(mask, *corners)
        truth = TileKind.FULL if allowed.all() else TileKind.PARTIAL if allowed.any() else TileKind.EMPTY
        assert kind in (truth, TileKind.PARTIAL)
        if mask.exact:
            assert kind == truth


@given(mask=interval_masks)
def test_intersections_of_intervals_are_bands(mask):
    band = mask.band
    rows = _dense(mask, 0, 150, 0, 150)
    for allowed in rows:
        keys = np.flatnonzero(allowed)
        assert len(keys) == 0 or len(keys) == keys[-1] - keys[0] + 1
    assert band is not None


@given(mask=any_masks)
def test_classify_agrees_between_numpy_and_traced_jax(mask):
    corners = (np.array([0, 31, 80]), np.array([30, 79, 120]), np.array([0, 10, 64]), np.array([9, 63, 140]))
    traced = jax.jit(lambda *c: jnp.broadcast_to(mask.classify(*c), (3,)))(*corners)
    np.testing.assert_array_equal(traced, np.broadcast_to(mask.classify(*corners), (3,)))


@given(mask=any_masks)
def test_equal_masks_hash_equal_and_reprs_are_read_back(mask):
    rebuilt = mask & mask
    assert rebuilt == mask & mask
    assert hash(rebuilt) == hash(mask & mask)
    if "MaskFn" not in repr(mask) and "NumpyMask" not in repr(mask):
        assert parse_mask(repr(mask)) == mask


def test_numpy_masks_are_equal_by_content():
    array = np.eye(5, dtype=bool)
    assert NumpyMask(array) == NumpyMask(array.copy())
    assert NumpyMask(array) != NumpyMask(~array)
    array[0, 1] = True
    assert not NumpyMask(np.eye(5, dtype=bool))(0, 1)


def test_a_numpy_mask_allows_nothing_outside_its_array():
    mask = NumpyMask(np.ones((3, 5), bool))
    positions = np.arange(-2, 8)
    expected = np.outer((positions >= 0) & (positions < 3), (positions >= 0) & (positions < 5))
    np.testing.assert_array_equal(mask(positions[:, None], positions[None]), expected)
    np.testing.assert_array_equal(mask(jnp.asarray(positions)[:, None], jnp.asarray(positions)[None]), expected)


def test_multi_head_masks_stay_outermost():
    heads = MultiHeadMask([CausalMask(), FullMask()])
    combined = ~(heads & LocalMask(3, 3)) | MultiHeadMask([PrefixMask(1), PrefixMask(2)])
    assert isinstance(combined, MultiHeadMask)
    q_pos, kv_pos = np.arange(9)[:, None], np.arange(9)[None]
    local = LocalMask(3, 3)(q_pos, kv_pos)
    expected = [~(CausalMask()(q_pos, kv_pos) & local) | (kv_pos < 1), ~local | (kv_pos < 2)]
    np.testing.assert_array_equal(combined(q_pos, kv_pos), expected)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CausalMask(3) & LocalMask(5, 0), True),
        (~CausalMask() | FullMask(), True),
        (ChunkedCausalMask(8), False),
        (CausalMask() | PrefixMask(4), False),
        (MultiHeadMask([CausalMask(), PrefixMask(4)]), False),
        (MaskFn(lambda q, kv: q == kv), False),
    ],
    ids=repr,
)
def test_translation_invariance(mask, expected):
    assert mask.translation_invariant is expected


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_a_scheduled_window_grows_in_whole_tokens_and_stops(xp):
    window = ScheduledWindow(3, 8_000_000, 100_001)
    for step in (0, 1, 2, 3, 50_001, 100_000, 100_001, 2**31 - 1):
        width = window.width(xp.int32(step))
        exact = 3 + min(max(step - 1, 0), 100_000) * 7_999_997 / 100_000
        assert (width.dtype, width == pytest.approx(exact, rel=1e-6, abs=0.5)) == (np.int32, True)
    assert (window.width(1), window.width(100_001)) == (3, 8_000_000)
    assert (CausalMask() & (window & FullMask())).scheduled_window == window
    assert CausalMask().scheduled_window is None


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match="use & instead of and"):
        bool(CausalMask() and LocalMask(1, 1))
    with pytest.raises(TypeError):
        CausalMask() & np.ones((3, 3), bool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalMask(1.5, 0), "LocalMask.left must be an integer or None, got 1.5"),
        (lambda: CausalMask(True), "CausalMask.offset must be an integer"),
        (lambda: ChunkedCausalMask(0), "chunk_size=0 must be at least 1"),
        (lambda: PrefixMask(-1), "length=-1 must be at least 0"),
        (lambda: MaskFn(3), "must be a function"),
        (lambda: NumpyMask(np.ones((2, 2))), "2-D boolean array"),
        (lambda: MultiHeadMask([]), "at least one mask"),
        (lambda: MultiHeadMask([CausalMask(), None]), "one single-head mask per head"),
        (
            lambda: MultiHeadMask([CausalMask()] * 2) & MultiHeadMask([CausalMask()] * 3),
            "cannot combine masks for 2 and 3 heads",
        ),
        (lambda: parse_mask("CausalMask() and FullMask()"), "cannot read 'CausalMask\\(\\) and FullMask\\(\\)'"),
        (lambda: parse_mask("__import__('os')"), "cannot read"),
        (lambda: parse_mask("LocalMask(1"), "cannot read the mask"),
        (lambda: LocalMask(1024), r"needs left and right.*a causal window over W tokens is LocalMask\(W - 1, 0\)"),
        (lambda: LocalMask((1023, 0)), "LocalMask needs left and right, two numbers"),
        (lambda: parse_mask("LocalMask(1)"), "LocalMask needs left and right, two numbers"),
        (lambda: parse_mask("CausalMsk()"), r"cannot read 'CausalMsk\(\)' in a mask.*; did you mean CausalMask\?"),
        (lambda: parse_mask("Full"), r"cannot read 'Full' in a mask.*; did you mean FullMask\?"),
        (lambda: require_mask(CausalMask), r"got the class CausalMask; make one of it: CausalMask\(…\)"),
        (
            lambda: require_mask(np.zeros((4, 4))),
            r"got ndarray; an array of floats is a bias: the kernels take no bias",
        ),
        (lambda: parse_mask("3"), "it is 3, not a mask"),
        (lambda: parse_mask("LocalMask(1, 0, **x)"), "cannot read 'LocalMask\\(1, 0, \\*\\*x\\)' in a mask"),
        (lambda: parse_mask("CausalMask(offset=1, offset=2)"), "cannot read"),
        (lambda: parse_mask("LocalMask(~5, 1)"), "cannot read '5' in a mask: &, \\| and ~ are for masks"),
        (lambda: parse_mask("LocalMask(3 & 1, 1)"), "cannot read '3' in a mask"),
        (lambda: NumpyMask(np.zeros((0, 3), bool)), "with an element at least, got bool of shape \\(0, 3\\)"),
        (lambda: MultiHeadMask(CausalMask()), "takes a list with one mask per head, got CausalMask"),
        (lambda: ScheduledWindow(0, 8, 10), "ScheduledWindow.start=0 must be at least 1"),
        (lambda: ScheduledWindow(9, 8, 10), "start=9 is more than stop=8; windows grow"),
        (lambda: ScheduledWindow(1, 2**24, 10), "stop=16777216 must be at most 8388608"),
        (lambda: ScheduledWindow(4, 8, 1), "num_steps=1 must be at least 2"),
        (lambda: (CausalMask() | GROWING).scheduled_window, "combines with other masks by & alone"),
        (lambda: (CausalMask() & ~GROWING).scheduled_window, "combines with other masks by & alone"),
        (lambda: (GROWING & ScheduledWindow(1, 2, 3)).scheduled_window, "and with no other one"),
        (lambda: MultiHeadMask([GROWING, CausalMask()]).scheduled_window, "combines with other masks by & alone"),
        (lambda: make_block_plan(None, 8, 8, 4, 4), "mask must be a kernels.Mask"),
        (lambda: count_allowed_pairs(None, 8, 8), "mask must be a kernels.Mask"),
        (lambda: block_map(CausalMask(), 8, num_tiles=0), "num_tiles=0 must be at least 1"),
        (lambda: block_map(CausalMask(), 0, 8), "q_len=0 must be at least 1"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _dense(mask, q_lo, q_hi, kv_lo, kv_hi):
    q_pos, kv_pos = np.arange(q_lo, q_hi + 1)[:, None], np.arange(kv_lo, kv_hi + 1)[None, :]
    if "NumpyMask" in repr(mask):
        q_pos, kv_pos = np.minimum(q_pos, 299), np.minimum(kv_pos, 299)
    return np.broadcast_to(np.asarray(mask(q_pos, kv_pos)), (q_pos.size, kv_pos.size))
