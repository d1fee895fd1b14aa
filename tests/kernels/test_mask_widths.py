"""Masks of any integer width, against their definitions in Python integers: everywhere that a width is read."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels import (
    BlockwiseTuning,
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    MultiHeadMask,
    PrefixMask,
    SlabCache,
    SplashTuning,
    Target,
    TileKind,
    TritonDecodeTuning,
    TritonTiles,
    TritonTuning,
    count_allowed_pairs,
    decode_attention,
    dot_product_attention,
    make_block_plan,
    parse_mask,
    select_backend,
    slab_capacity,
)
from kernels.backends.mosaic_gpu.tuning import call_family
from kernels.call import make_call
from kernels.masks.drawing import block_map
from tests.kernels.integer_masks import LAST, UNREACHABLE, WITHIN_REACH, integers, positions, specs
from tests.kernels.spelled_out import attention_of

# As many each time, so that JAX compiles its operations once.
few_positions = st.lists(positions, min_size=5, max_size=5)


@settings(max_examples=25)
@given(spec=specs, q_pos=few_positions, kv_pos=few_positions)
def test_pairs(spec, q_pos, kv_pos):
    mask, expected = spec.mask(), spec.dense(q_pos, kv_pos)
    for make in (np.int32, np.int64, np.uint32, jnp.int32):
        xp = jnp if make is jnp.int32 else np
        q, kv = xp.asarray(q_pos, make), xp.asarray(kv_pos, make)
        allowed = mask(q[:, None], kv[None])
        assert isinstance(allowed, jax.Array if xp is jnp else np.ndarray)
        np.testing.assert_array_equal(allowed, expected, str(make))
        # One position may be a number of Python's own.
        np.testing.assert_array_equal(mask(q_pos[0], kv), expected[0])
        np.testing.assert_array_equal(mask(q, kv_pos[0]), expected[:, 0])
    assert mask(q_pos[0], kv_pos[0]) == expected[0, 0]


@settings(max_examples=25)
@given(spec=specs, width=integers, kv_pos=few_positions, q_pos=st.integers(-100, -1))
def test_queries_a_little_before_the_first_position(spec, width, kv_pos, q_pos):
    """As decoding makes them of sequences shorter than the new tokens: their windows don't wrap around either."""
    kv = jnp.asarray(kv_pos, jnp.int32)
    local = LocalMask(width, None)(jnp.int32(q_pos), kv)
    np.testing.assert_array_equal(local, [width >= LAST or q_pos - width <= x for x in kv_pos])
    causal = CausalMask(width)(jnp.int32(q_pos), kv)
    np.testing.assert_array_equal(causal, [width >= LAST or x <= q_pos + width for x in kv_pos])


@st.composite
def rectangles(draw):
    """Corners of a rectangle of at most 4 × 4 positions, anywhere."""
    q_lo, kv_lo = draw(positions), draw(positions)
    return q_lo, min(q_lo + draw(st.integers(0, 3)), LAST), kv_lo, min(kv_lo + draw(st.integers(0, 3)), LAST)


@settings(max_examples=25)
@given(spec=specs, some=st.lists(rectangles(), min_size=5, max_size=5))
def test_kinds_of_small_rectangles(spec, some):
    mask = spec.mask()
    truth = []
    for q_lo, q_hi, kv_lo, kv_hi in some:
        allowed = spec.dense(range(q_lo, q_hi + 1), range(kv_lo, kv_hi + 1))
        truth.append(TileKind.FULL if allowed.all() else TileKind.PARTIAL if allowed.any() else TileKind.EMPTY)
    columns = list(zip(*some, strict=True))
    on_device = [jnp.asarray(x, jnp.int32) for x in columns]
    on_host = [np.asarray(x, np.int64) for x in columns]
    for corners in (on_host, on_device, on_device[:2] + on_host[2:], [np.asarray(x, np.int32) for x in columns]):
        kinds = np.broadcast_to(mask.classify(*corners), len(some))
        assert ((kinds == truth) | ((kinds == TileKind.PARTIAL) & (not mask.exact))).all()
    assert int(mask.classify(*some[0])) == kinds[0]


@settings(max_examples=25)
@given(spec=specs, q=st.tuples(positions, positions), kv=st.tuples(positions, positions), inner=few_positions)
def test_kinds_of_large_rectangles_hold_for_pairs_in_them(spec, q, kv, inner):
    (q_lo, q_hi), (kv_lo, kv_hi) = sorted(q), sorted(kv)
    corners = (q_lo, q_hi, kv_lo, kv_hi)
    kinds = {int(spec.mask().classify(*(make(x) for x in corners))) for make in (int, np.int64, jnp.int32)}
    assert len(kinds) == 1
    allowed = spec.dense([q_lo, q_hi, *np.clip(inner, q_lo, q_hi)], [kv_lo, kv_hi, *np.clip(inner, kv_lo, kv_hi)])
    assert not (allowed.any() and kinds == {TileKind.EMPTY})
    assert allowed.all() or kinds != {TileKind.FULL}


@given(spec=specs, starts=st.tuples(positions, positions), q_len=st.integers(1, 30), kv_len=st.integers(1, 30))
def test_plans_of_any_part_of_the_matrix(spec, starts, q_len, kv_len):
    q_offset, kv_offset = min(starts[0], LAST + 1 - q_len), min(starts[1], LAST + 1 - kv_len)
    plan = make_block_plan(spec.mask(), q_len, kv_len, 4, 5, q_offset=q_offset, kv_offset=kv_offset)
    dense = spec.dense(range(q_offset, q_offset + q_len), range(kv_offset, kv_offset + kv_len))
    for (i, j), kind in np.ndenumerate(plan.tile_kinds()):
        tile = dense[4 * i : 4 * i + 4, 5 * j : 5 * j + 5]
        full = tile.all() and 5 * j + 5 <= kv_len
        assert kind == (TileKind.FULL if full else TileKind.PARTIAL if tile.any() else TileKind.EMPTY)


@given(spec=specs)
def test_text_pictures_and_counts(spec):
    mask, dense = spec.mask(), spec.dense(range(16), range(16))
    assert parse_mask(repr(mask)) == mask
    assert str(mask).startswith(repr(mask)), "drawn at whatever length shows its shape"
    picture = block_map(mask, 16).splitlines()[:16]
    np.testing.assert_array_equal([[symbol == "█" for symbol in row] for row in picture], dense)
    assert count_allowed_pairs(mask, 16, 16) == dense.sum()


@pytest.mark.parametrize(
    ("mask", "same"),
    [
        (CausalMask(LAST), FullMask()),
        (CausalMask(10**30), FullMask()),
        (LocalMask(LAST, 0), CausalMask()),
        (LocalMask(7, 2**31), LocalMask(7, None)),
        (LocalMask(2**63, LAST), FullMask()),
        (PrefixMask(2**31), FullMask()),
        (ChunkedCausalMask(2**31), CausalMask()),
        (ChunkedCausalMask(10**30) & LocalMask(5, 10**30) & PrefixMask(2**40), LocalMask(5, 0)),
    ],
    ids=lambda mask: repr(mask),
)
def test_a_width_that_no_position_reaches_is_no_bound(mask, same):
    """So everything that is chosen by a mask's structure is chosen as for the mask without it."""
    assert mask.band == same.band
    assert mask.translation_invariant == same.translation_invariant
    assert call_family(mask, packed=False) == call_family(same, packed=False)
    assert slab_capacity(mask, 1000) == slab_capacity(same, 1000)
    assert str(mask).splitlines()[1:] == str(same).splitlines()[1:]
    x = jnp.zeros((1, 8, 2, 16), jnp.bfloat16)
    keywords = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions", "scale")
    chosen = []
    for each in (mask, same):
        call = make_call(x, x, x, each, **dict.fromkeys((*keywords, "logits_soft_cap", "sinks")), return_lse=False)[1]
        selection = select_backend(call._replace(target=Target("gpu", "NVIDIA A100", 8.0)))
        chosen.append((selection.name, [name for name, _ in selection.passed_over]))
    assert chosen[0] == chosen[1]


def test_windows_just_within_reach_are_drawn_at_the_longest_length():
    assert "2147483648 queries × 2147483648 keys" in str(LocalMask(LAST - 1, 0))


def test_plans_refuse_positions_that_int32_does_not_hold():
    with pytest.raises(ValueError, match="kv_len=9 from position kv_offset=2147483640 on goes past the last position"):
        make_block_plan(CausalMask(), 8, 9, 4, 4, q_offset=2**31 - 8, kv_offset=2**31 - 8)


@settings(max_examples=25)
@given(spec=specs, q_pos=few_positions, kv_pos=few_positions)
def test_intervals_of_rows(spec, q_pos, kv_pos):
    """The intervals that the Triton kernels evaluate instead of a mask."""
    for q in (np.asarray(q_pos, np.int32), jnp.asarray(q_pos, jnp.int32)):
        interval = spec.mask().row_interval(q)
        assume(interval is not None)
        first, last = (np.asarray(x)[:, None] for x in interval)
        assert first.dtype == last.dtype == np.int32
        kv = np.asarray(kv_pos, np.int32)
        np.testing.assert_array_equal((first <= kv) & (kv <= last), spec.dense(q_pos, kv_pos))


def far_apart(rng, length):
    """Positions from both ends of int32, and in between."""
    somewhere = [rng.integers(0, 40, length), LAST - rng.integers(0, 40, length), rng.integers(0, LAST, length)]
    return np.sort(np.choose(rng.integers(0, 3, length), somewhere)).astype(np.int32)


HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = {
    "reference": "reference",
    "blockwise": BlockwiseTuning(16, 16),
    "splash": SplashTuning.square(128, interpret=True),
    "triton": TritonTuning("split", forward=TritonTiles(32, 32), interpret=True),
    "mosaic_gpu": MosaicGpuTuning("split", MosaicForwardTuning(1, 64), MosaicBackwardTuning(1), interpret=True),
}


@pytest.mark.parametrize("given_positions", [False, True], ids=["counted", "far_apart"])
@pytest.mark.parametrize(
    "name",
    [*(name for name in BACKENDS if name != "mosaic_gpu"), pytest.param("mosaic_gpu", marks=pytest.mark.jax_0_11)],
)
def test_backends(name, given_positions, rng):
    if name == "triton" and not HAS_TRITON:
        pytest.skip("Triton isn't installed: it is for Linux alone")
    table = WITHIN_REACH if given_positions else UNREACHABLE
    if name == "triton":
        table = [spec for spec in table if spec.mask().has_row_intervals]
    # Each distinct mask costs most backends a kernel, so one of them each time.
    heads = list(rng.permutation(np.array(table, object))[: len(table) if name == "reference" else 1])
    length = 40
    q_pos, kv_pos = np.arange(length), np.arange(length)
    keywords = {}
    if given_positions:
        q_pos = far_apart(rng, length)
        keywords["query_positions"] = jnp.asarray(q_pos)
        kv_pos = far_apart(rng, length)
        keywords["key_value_positions"] = jnp.asarray(kv_pos)
    dtype = jnp.float16 if name in ("triton", "mosaic_gpu") else jnp.float32
    arrays = [jnp.asarray(rng.standard_normal((1, length, len(heads), 16)), dtype) for _ in range(3)]
    masks = MultiHeadMask([spec.mask() for spec in heads])
    output = dot_product_attention(*arrays, masks, implementation=BACKENDS[name], **keywords)
    expected = attention_of(np.stack([spec.dense(q_pos, kv_pos) for spec in heads]), *arrays)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5 if dtype == jnp.float32 else 1e-2)


def test_gradients(rng):
    """dK and dV walk the transposed plan: where no query may attend to a key, its gradients are 0."""
    q_pos, kv_pos = far_apart(rng, 40), far_apart(rng, 40)
    x = jnp.asarray(rng.standard_normal((1, 40, 1, 8)), jnp.float32)
    spec = WITHIN_REACH[int(rng.integers(len(WITHIN_REACH)))]

    def loss(value):
        given_positions = {"query_positions": jnp.asarray(q_pos), "key_value_positions": jnp.asarray(kv_pos)}
        return dot_product_attention(
            x, x, value, spec.mask(), implementation=BACKENDS["blockwise"], **given_positions
        ).sum()

    dense = spec.dense(q_pos, kv_pos)
    logits = np.einsum("qh,kh->qk", *(np.asarray(x, np.float64)[0, :, 0],) * 2) / 8**0.5
    weights = np.where(dense, np.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    expected = (weights / np.where(total == 0, 1, total)).sum(0)
    np.testing.assert_allclose(jax.grad(loss)(x)[0, :, 0, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_decoding_at_the_last_positions(implementation, rng):
    """A ring that holds the last 32 positions that there are, and one that is hardly begun."""
    heads = [UNREACHABLE[i] for i in (0, 2, 3)] + [WITHIN_REACH[0]]
    if implementation == "triton" and not HAS_TRITON:
        pytest.skip("Triton isn't installed: it is for Linux alone")
    dtype = jnp.float16 if implementation == "triton" else jnp.float32
    key, value = (jnp.asarray(rng.standard_normal((2, 32, 4, 16)), dtype) for _ in range(2))
    query = jnp.asarray(rng.standard_normal((2, 3, 4, 16)), dtype)
    lengths = [LAST, 5]
    cache = dataclasses.replace(
        SlabCache.empty(2, 32, 4, 16, dtype=dtype, block_size=16), key=key, value=value, lengths=jnp.asarray(lengths)
    )
    mask = MultiHeadMask([spec.mask() for spec in heads])
    tuning = TritonDecodeTuning(num_programs=4, interpret=True) if implementation == "triton" else implementation
    output = decode_attention(query, cache, mask, implementation=tuning)
    for row, length in enumerate(lengths):
        held = np.arange(max(0, length - 32), length)
        dense = np.stack([spec.dense(range(length - 3, length), held) for spec in heads])
        slots = held % 32
        expected = attention_of(dense, query[row : row + 1], key[row : row + 1, slots], value[row : row + 1, slots])
        np.testing.assert_allclose(output[row : row + 1], expected, rtol=0, atol=1e-2 if dtype == jnp.float16 else 1e-5)
