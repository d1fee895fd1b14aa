"""`MaskFn`: what functions may capture and return, in every backend, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    BlockwiseTuning,
    CausalMask,
    FullMask,
    MaskFn,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    MultiHeadMask,
    NumpyMask,
    SlabCache,
    SplashTuning,
    Target,
    TileKind,
    decode_attention,
    dot_product_attention,
    make_block_plan,
    select_backend,
)
from kernels.call import make_call
from kernels.masks.drawing import block_map
from layers.flax_interop import attention_fn
from tests.kernels.spelled_out import attention_of

LENGTH = 48
SMALL = BlockwiseTuning(16, 16)
SPLASH = SplashTuning.square(128, interpret=True)
MOSAIC = MosaicGpuTuning("split", MosaicForwardTuning(1, 64), MosaicBackwardTuning(1), interpret=True)
HOPPER, TPU = Target("gpu", "NVIDIA H200", 9.0), Target("tpu", "TPU v5")


@pytest.fixture
def document(rng):
    return np.sort(rng.integers(0, 5, LENGTH))


def same_document(document):
    """FlexAttention's canonical mask."""
    ids = jnp.asarray(document)
    return lambda q_pos, kv_pos: ids[q_pos] == ids[kv_pos]


def operands(rng, *, num_heads=1, dtype=jnp.float32):
    return [jnp.asarray(rng.standard_normal((1, LENGTH, num_heads, 16)), dtype) for _ in range(3)]


def call_of(mask, target=None, **given):
    keywords = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions", "scale")
    arguments = dict.fromkeys((*keywords, "logits_soft_cap", "sinks")) | given
    call = make_call(*[jnp.zeros((1, LENGTH, 1, 64), jnp.bfloat16)] * 3, mask, **arguments, return_lse=False)[1]
    return call if target is None else call._replace(target=target)


@pytest.mark.parametrize("implementation", ["reference", SMALL, SPLASH], ids=["reference", "blockwise", "splash"])
def test_captured_arrays(implementation, document, rng):
    arrays, mask = operands(rng), CausalMask() & MaskFn(same_document(document))
    dense = (document[:, None] == document) & np.tri(LENGTH, dtype=bool)

    @jax.jit
    def attend(value):
        return dot_product_attention(*arrays[:2], value, mask, implementation=implementation)

    output, vjp = jax.vjp(attend, arrays[2])
    np.testing.assert_allclose(output, attention_of(dense, *arrays), atol=1e-5)
    # dV of Σ output: the weights that each key gets, of allowed queries alone.
    (d_value,) = vjp(jnp.ones_like(output))
    weights = attention_of(dense, *arrays[:2], np.eye(LENGTH)[None, :, None])[0, :, 0]
    np.testing.assert_allclose(d_value[0, :, 0], np.repeat(weights.sum(0)[:, None], 16, 1), atol=1e-4)


@pytest.mark.jax_0_11
def test_mosaic_gpu_passes_captured_arrays_over(document):
    call = call_of(MaskFn(same_document(document)), HOPPER)
    with pytest.raises(ValueError, match=r"can't look up the arrays that MaskFn\(.*\) holds"):
        select_backend(call, "mosaic_gpu")
    assert "holds" in dict(select_backend(call).passed_over)["mosaic_gpu"]
    assert select_backend(call_of(MaskFn(lambda q, kv: q - kv < 4), HOPPER)).name == "mosaic_gpu"


@pytest.mark.parametrize(
    "capture",
    [
        lambda ids: lambda q, kv: ids[q] == ids[kv],
        lambda ids: lambda q, kv: jnp.isin(q, jnp.asarray([1, 2])) | (kv <= q),
        lambda ids: lambda q, kv: q - kv < jnp.int32(4) + ids[0],
        lambda ids: functools.partial(lambda ids, q, kv: ids[q] == ids[kv], ids),
        lambda ids: (lambda inner: lambda q, kv: inner(q) == inner(kv))(jax.jit(lambda x: ids[x])),
    ],
    ids=["closure", "made within", "scalar", "partial", "jitted"],
)
def test_splash_serves_captures_as_tiles_or_refuses_before_tracing(capture, document):
    mask = MaskFn(capture(jnp.asarray(document)))
    assert select_backend(call_of(mask, TPU)).name == "splash"
    selection = select_backend(call_of(mask, TPU, query_positions=jnp.arange(LENGTH)))
    assert selection.name == "blockwise"
    assert "at positions that are known on the device only" in dict(selection.passed_over)["splash"]


def test_arrays_are_seen_wherever_jax_keeps_them():
    """As operands in the trace, too, whose text shows little of a long one."""
    if not hasattr(jax.config, "jax_use_simplified_jaxpr_constants"):
        pytest.skip("this JAX keeps them in one way")
    ids = np.zeros(5000, np.int32)
    before = jax.config.jax_use_simplified_jaxpr_constants
    for simplified in (False, True):
        jax.config.update("jax_use_simplified_jaxpr_constants", simplified)
        try:
            masks = [MaskFn(same_document(ids + (np.arange(5000) == at))) for at in (2500, 2501)]
            lookups, states = [mask.needs_lookup for mask in masks], [mask.state() for mask in masks]
        finally:
            jax.config.update("jax_use_simplified_jaxpr_constants", before)
        assert all(lookups)
        assert None not in states
        assert states[0] != states[1]


def test_an_array_that_is_being_traced_is_refused(document, rng):
    arrays = operands(rng)

    @jax.jit
    def attend(ids):
        return dot_product_attention(*arrays, MaskFn(lambda q, kv: ids[q] == ids[kv]))

    with pytest.raises(ValueError, match=r"captures an array that is being traced.* query_segment_ids"):
        attend(jnp.asarray(document))


class Window:
    """State that changes, reached in every way that Python has."""

    def __init__(self, width):
        self.width = width
        self.array = np.array([width])

    def __call__(self, q_pos, kv_pos):
        return (kv_pos <= q_pos) & (q_pos - kv_pos < self.width)

    def method(self, q_pos, kv_pos):
        return self(q_pos, kv_pos)

    def lookup(self, q_pos, kv_pos):
        return (kv_pos <= q_pos) & (q_pos - kv_pos < jnp.asarray(self.array)[0])

    def __eq__(self, other):
        raise AssertionError("equality is the object's own business")

    __hash__ = None


@pytest.mark.parametrize(
    "of",
    [
        lambda w: w,
        lambda w: w.method,
        lambda w: functools.partial(Window.__call__, w),
        lambda w: lambda q, kv: w(q, kv),
        lambda w: w.lookup,
    ],
    ids=["callable", "method", "partial", "closure", "array"],
)
def test_state_that_changes_between_calls_is_seen(of, rng):
    window = Window(3)
    mask = MaskFn(of(window))
    assert mask == MaskFn(mask.fn)
    assert hash(mask) == hash(MaskFn(mask.fn))
    assert mask != MaskFn(of(Window(3)))
    x = operands(rng)
    for width in (3, 40):
        window.width = window.array[0] = width
        dense = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-width, dtype=bool)
        plan = make_block_plan(mask, LENGTH, LENGTH, 16, 16)
        np.testing.assert_array_equal(plan.tile_kinds() != TileKind.EMPTY, dense.reshape(3, 16, 3, 16).any((1, 3)))
        assert make_block_plan(mask, LENGTH, LENGTH, 16, 16) is plan, "made once for each state"
    output = dot_product_attention(*x, mask, implementation=SMALL)
    np.testing.assert_allclose(output, attention_of(dense, *x), atol=1e-5)


def test_splash_sees_state_that_changes_between_calls(rng):
    window = Window(3)
    x = operands(rng)
    for width in (3, 40):
        window.width = width
        dense = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-width, dtype=bool)
        output = dot_product_attention(*x, MaskFn(window), implementation=SPLASH)
        np.testing.assert_allclose(output, attention_of(dense, *x), atol=1e-5)


IGNORING = {
    "query": (lambda q, kv: kv < 20, np.broadcast_to(np.arange(LENGTH) < 20, (LENGTH, LENGTH))),
    "key": (lambda q, kv: q >= 20, np.broadcast_to(np.arange(LENGTH)[:, None] >= 20, (LENGTH, LENGTH))),
    "both": (lambda q, kv: True, np.ones((LENGTH, LENGTH), bool)),
    "all": (lambda q, kv: np.False_, np.zeros((LENGTH, LENGTH), bool)),
}


@pytest.mark.parametrize(
    "implementation",
    ["reference", SMALL, SPLASH, pytest.param(MOSAIC, marks=pytest.mark.jax_0_11)],
    ids=["reference", "blockwise", "splash", "mosaic_gpu"],
)
def test_functions_that_ignore_positions(implementation, rng):
    names = list(IGNORING) if implementation == "reference" else [list(IGNORING)[rng.integers(4)]]
    dtype = jnp.float16 if implementation is MOSAIC else jnp.float32
    x = operands(rng, num_heads=len(names) + 1, dtype=dtype)
    mask = MultiHeadMask([*(MaskFn(IGNORING[name][0]) for name in names), CausalMask()])
    output = dot_product_attention(*x, mask, implementation=implementation)
    dense = np.stack([*(IGNORING[name][1] for name in names), np.tri(LENGTH, dtype=bool)])
    np.testing.assert_allclose(output, attention_of(dense, *x), atol=1e-2 if implementation is MOSAIC else 1e-5)


@pytest.mark.parametrize(("fn", "dense"), IGNORING.values(), ids=IGNORING)
def test_functions_that_ignore_positions_elsewhere(fn, dense):
    for xp in (np, jnp):
        position = xp.arange(LENGTH)
        for mask in (MaskFn(fn), MaskFn(fn) & FullMask(), ~~MaskFn(fn)):
            np.testing.assert_array_equal(mask(position[:, None], position), dense)
    assert MaskFn(fn)(3, 4) == dense[3, 4]
    plan = make_block_plan(MaskFn(fn), LENGTH, LENGTH, 1, 1)
    np.testing.assert_array_equal(plan.tile_kinds() == TileKind.FULL, dense)
    assert len(block_map(MaskFn(fn), 16).splitlines()) == 17
    query, token = jnp.ones((1, 2, 1, 16)), jnp.ones((1, 1, 1, 16))
    cache = SlabCache.empty(1, 16, 1, 16, dtype=jnp.float32).write(token, token)
    _, lse = decode_attention(query, cache, MaskFn(fn), query_positions=jnp.array([[0, 1]]), return_lse=True)
    np.testing.assert_array_equal(np.isfinite(lse[0, :, 0]), dense[:2, 0])


REFUSED = {
    "integers": (lambda q, kv: (q >= kv) * 1, r"must return booleans, got int32; compare, as in"),
    "floats": (lambda q, kv: (q - kv) * 0.5, "must return booleans, got float32"),
    "a number": (lambda q, kv: 1, "must return booleans, got int32"),
    "nothing": (lambda q, kv: None, "must return one array of booleans, got 0 arrays"),
    "two": (lambda q, kv: (q <= kv, q >= kv), "must return one array of booleans, got 2 arrays"),
    "a larger shape": (lambda q, kv: (q >= kv)[None], r"broadcasts to \(2, 3\), its arguments', got \(1, 2, 3\)"),
    "another shape": (lambda q, kv: jnp.ones((5, 3), bool), r"broadcasts to \(2, 3\), its arguments', got \(5, 3\)"),
    "a NumPy array": (lambda q, kv: np.arange(LENGTH)[q] == kv, "can't be traced: .*jnp.asarray"),
    "NumPy's functions": (lambda q, kv: np.abs(q - kv) < 3, "can't be traced: write its function with operators"),
    "control flow": (lambda q, kv: kv <= q if q.sum() > 3 else kv > q, "can't be traced"),
    "past int32": (lambda q, kv: kv <= q + 2**40, "can't be traced: .* OverflowError"),
}


@pytest.mark.parametrize(("fn", "message"), REFUSED.values(), ids=REFUSED)
def test_functions_that_are_refused_before_tracing(fn, message, rng):
    x, token = operands(rng), jnp.ones((1, 1, 1, 16))
    cache = SlabCache.empty(1, 16, 1, 16, dtype=jnp.float32)
    for mask in (MaskFn(fn), CausalMask() & ~MaskFn(fn)):
        for call in (
            lambda mask: dot_product_attention(*x, mask),
            jax.jit(lambda mask: dot_product_attention(*x, mask), static_argnums=0),
            lambda mask: decode_attention(token, cache, mask),
            lambda mask: attention_fn(mask)(*x),
        ):
            with pytest.raises(ValueError, match=message):
                call(mask)


def test_what_is_evaluated_on_the_host_is_checked_there():
    with pytest.raises(ValueError, match="must return booleans, got int64"):
        make_block_plan(MaskFn(lambda q, kv: (q >= kv) * 1), 8, 8, 4, 4)
    with pytest.raises(ValueError, match=r"to \(1, 4, 4\), its arguments', got"):
        make_block_plan(MaskFn(lambda q, kv: np.ones((7, 7), bool)), 4, 4, 4, 4)


CLASSIFIED = {
    "booleans": (lambda *corners: corners[0] == corners[0], "must return integers, got bool; TileKind.EMPTY, PARTIAL"),
    "floats": (lambda *corners: corners[0] * 1.0, "must return integers, got float"),
    "another kind": (lambda *corners: corners[0] * 0 + 3, "must return 0 to 2, got 3 to 3"),
    "a larger shape": (
        lambda *corners: np.ones((7, 2), int),
        r"must return a shape that broadcasts to \(1,\), its arguments', got \(7, 2\)",
    ),
}


@pytest.mark.parametrize(("classify_fn", "message"), CLASSIFIED.values(), ids=CLASSIFIED)
def test_classifications_that_are_refused(classify_fn, message):
    with pytest.raises(ValueError, match=f"classify_fn of MaskFn.* {message}"):
        make_block_plan(MaskFn(lambda q, kv: kv <= q, classify_fn), 8, 8, 4, 4)
    with pytest.raises(ValueError, match="classify_fn must be a function"):
        MaskFn(lambda q, kv: kv <= q, 3)


def test_classifications_in_jax_or_as_one_kind_for_all(rng):
    """Under `jax.jit`, and within a `MultiHeadMask` on positions that are known on the device only."""

    def causal(q_lo, q_hi, kv_lo, kv_hi):
        return jnp.where(kv_lo > q_hi, TileKind.EMPTY, TileKind.PARTIAL)

    x = operands(rng, num_heads=2)
    masks = MultiHeadMask([MaskFn(lambda q, kv: kv <= q, causal), MaskFn(lambda q, kv: True, lambda *_: TileKind.FULL)])
    dense = np.stack([np.tri(LENGTH, dtype=bool), np.ones((LENGTH, LENGTH), bool)])
    output = jax.jit(lambda *x: dot_product_attention(*x, masks, implementation=SMALL))(*x)
    np.testing.assert_allclose(output, attention_of(dense, *x), atol=1e-5)
    assert np.shape(masks.classify(*np.zeros((4, 3), int))) == (2, 3)


def test_an_array_beside_a_function_in_jax(rng):
    """The plan of `NumpyMask & MaskFn`, whose tiles splash takes as arrays, is evaluated while JAX traces."""
    allowed = rng.random((LENGTH, LENGTH)) < 0.5
    mask = NumpyMask(allowed) & MaskFn(lambda q, kv: jnp.logical_or(q == kv, kv % 3 == 0))
    x = operands(rng)
    output = jax.jit(lambda *x: dot_product_attention(*x, mask, implementation=SPLASH))(*x)
    position = np.arange(LENGTH)
    dense = allowed & ((position[:, None] == position) | (position % 3 == 0))
    np.testing.assert_allclose(output, attention_of(dense, *x), atol=1e-5)


def test_callables_without_a_hash_are_masks_too():
    @dataclasses.dataclass
    class Documents:
        ids: np.ndarray

        def __call__(self, q_pos, kv_pos):
            return jnp.asarray(self.ids)[q_pos] == jnp.asarray(self.ids)[kv_pos]

    mask = MaskFn(Documents(np.arange(8) // 4))
    assert {mask: 1}[MaskFn(mask.fn)] == 1
    assert make_block_plan(mask, 8, 8, 4, 4).num_full == 2
