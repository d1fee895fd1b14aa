"""What the splash backend promises beyond values: the tiles that it visits, what tracing it costs, and refusals."""

import functools
import inspect
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    SplashTuning,
    Target,
    dot_product_attention,
    select_backend,
)
from kernels.attention.core import attend
from kernels.backends import BACKENDS
from kernels.backends.splash import dense, passes, tuning, upstream_lazy
from kernels.backends.splash.tile_grid import _grid, next_visited
from kernels.call import AttentionCall, AttentionInputs

TPU = Target("tpu", "TPU v5")
INTERPRETED = SplashTuning.square(128, interpret=True)
SPLASH = BACKENDS[0]
NO_TOKENS = passes.Tokens(None, None, None)

MASKS = [
    FullMask(),
    CausalMask(),
    CausalMask(-300),
    CausalMask(700),
    CausalMask() & LocalMask(400, 0),
    LocalMask(300, 200),
    ChunkedCausalMask(500),
    CausalMask() | PrefixMask(600),
    ~(CausalMask() & LocalMask(600, 0)),
    MaskFn(lambda q_pos, kv_pos: (kv_pos <= q_pos) & (q_pos // 256 % 3 == kv_pos // 256 % 3)),
]


def call_of(mask, length=2048, *, kv_len=None, dtype=jnp.bfloat16, heads=2, **changes):
    call = AttentionCall(
        batch=1,
        q_len=length,
        kv_len=kv_len or length,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=64,
        value_dim=64,
        dtype=jnp.dtype(dtype),
        mask=mask,
        scale=0.125,
        logits_soft_cap=None,
        has_sinks=False,
        has_segment_ids=False,
        has_query_positions=False,
        has_key_value_positions=False,
        return_lse=False,
        target=TPU,
    )
    return call._replace(**changes)


def all_passes(call, splash_tuning):
    yield passes.forward_pass(call, splash_tuning)
    yield passes.d_key_value_pass(call, splash_tuning)
    if splash_tuning.backward == "split":
        yield passes.d_query_pass(call, splash_tuning)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("kv_len", [2048, 1900])
def test_the_same_tiles_as_upstream_in_every_pass(mask, kv_len, backward):
    """Tile by tile against JAX's own MaskInfo, made from the dense mask."""
    call = call_of(mask, kv_len=kv_len)
    sizes = SplashTuning(256, 128, 128, 128, 256, 128, 256, 512, backward=backward)
    make_dense = functools.partial(upstream_lazy.upstream_mask, dense.dense_mask)
    for walk in all_passes(call, sizes):
        ours, theirs = (make(call, walk, NO_TOKENS).info for make in (passes.planned_mask, make_dense))
        if ours.block_mask is None:  # every tile is visited, and none is masked
            assert np.all(np.asarray(theirs.block_mask) == 2)
            continue
        visited = np.asarray(theirs.block_mask) > 0
        np.testing.assert_array_equal(np.asarray(ours.block_mask) > 0, visited)
        if mask.exact:
            np.testing.assert_array_equal(ours.block_mask, theirs.block_mask)
        np.testing.assert_array_equal(np.asarray(ours.data_next)[visited], np.asarray(theirs.data_next)[visited])


@pytest.mark.parametrize("mask", [CausalMask(), LocalMask(400, 0), ChunkedCausalMask(256)], ids=repr)
def test_the_lazy_baseline_is_upstreams_own(mask):
    """Its info and function are those that JAX's public constructor makes."""
    call = call_of(mask, 1024)
    walk = passes.forward_pass(call, SplashTuning.square(256))
    made = upstream_lazy.upstream_mask(upstream_lazy.lazy_mask, call, walk, NO_TOKENS)
    heads = upstream.mask_lib.MultiHeadMask([upstream_lazy.lazy_mask(mask, 1024, 1024, 1024)] * 2)
    theirs = upstream.make_splash_mha(heads, block_sizes=upstream.BlockSizes(256, 256), head_shards=1, q_seq_shards=1)
    assert made.function.__qualname__ == theirs.kwargs["mask_function"].__qualname__
    assert made.info.partial_mask_blocks is None
    jax.tree.map(np.testing.assert_array_equal, made.info, theirs.fwd_mask_info)


@pytest.mark.parametrize("name", ["splash_upstream_lazy", "splash_dense"])
@pytest.mark.parametrize(
    "mask",
    [CausalMask() & LocalMask(150, 0), PrefixMask(300), MultiHeadMask([CausalMask(), LocalMask(40, 200)])],
    ids=["window", "prefix", "two_masks"],
)
def test_the_baselines_compute_the_same(name, mask, rng):
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    call = call_of(mask, 384, kv_len=333, dtype=jnp.float32)
    query, key, value = (
        jnp.asarray(rng.standard_normal((1, length, heads, 64)), jnp.float32)
        for length, heads in ((384, 2), (333, 1), (333, 1))
    )

    def run(function):
        return jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2))(query, key, value)

    actual = run(lambda *x: attend(backend, AttentionInputs(*x), call, INTERPRETED)[0])
    expected = run(functools.partial(dot_product_attention, mask=mask, implementation="reference"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), actual, expected)


def test_next_visited_names_the_following_step_and_then_the_first(rng):
    for density in (0.0, 0.1, 0.5, 1.0):
        visited = rng.random((5, 7)) < density
        values = rng.integers(0, 100, (5, 7))
        flat = visited.reshape(-1)
        expected = [
            values.reshape(-1)[next((k % 35 for k in range(step, step + 35) if k < 35 and flat[k]), flat.argmax())]
            for step in range(35)
        ]
        for namespace in (np, jnp):
            found = next_visited(namespace.asarray(values), namespace.asarray(visited))
            assert isinstance(found, np.ndarray if namespace is np else jax.Array)
            np.testing.assert_array_equal(np.asarray(found).reshape(-1), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_documents_skip_the_tiles_between_them(transposed):
    call = call_of(CausalMask(), 1024, has_segment_ids=True)
    ids = jnp.asarray(np.repeat([1, 2, 3], [384, 256, 384]))
    sizes = SplashTuning.square(128)
    walk = passes.d_key_value_pass(call, sizes) if transposed else passes.forward_pass(call, sizes)
    info = passes.planned_mask(call, walk, passes.Tokens(ids, ids, None)).info
    alone = passes.planned_mask(call, walk, NO_TOKENS).info
    assert int((np.asarray(alone.block_mask) > 0).sum()) == 8 * 9 // 2
    assert int((np.asarray(info.block_mask) > 0).sum()) == 3 * 4 // 2 + 2 * 3 // 2 + 3 * 4 // 2


def test_not_a_number_in_an_empty_tile_is_never_read(rng):
    """A shard of a longer sequence: its plan is made on the device from the positions of its queries."""
    query = jnp.asarray(rng.standard_normal((1, 128, 1, 16)), jnp.float32)
    key_value = jnp.asarray(rng.standard_normal((1, 512, 1, 16)), jnp.float32)
    poisoned = key_value.at[:, :128].set(jnp.nan).at[:, 384:].set(jnp.nan)

    @jax.jit
    def run(key_value, positions):
        mask = CausalMask() & LocalMask(127, 0)
        attend = functools.partial(dot_product_attention, query_positions=positions, implementation=INTERPRETED)
        return jax.value_and_grad(lambda x: (attend(query, x, x, mask) ** 2).sum())(key_value)

    positions = jnp.arange(256, 384)
    value, gradient = run(poisoned, positions)
    expected_value, expected_gradient = run(key_value, positions)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient[:, 128:384], expected_gradient[:, 128:384], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(gradient[:, 384:], 0)


def trace(mask, length, heads=2, dtype=jnp.bfloat16, backward="split"):
    """Forward and backward, traced for a TPU as `jax.jit` would."""
    x = jax.ShapeDtypeStruct((1, length, heads, 128), dtype)

    def loss(query, key, value):
        inputs = AttentionInputs(query, key, value)
        call = call_of(mask, length, heads=heads, dtype=dtype, num_kv_heads=heads, head_dim=128, value_dim=128)
        sizes = SplashTuning.square(512, backward=backward)
        return attend(SPLASH, inputs, call, sizes)[0].astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(x, x, x)


def matmul_precisions(jaxpr):
    """Of every matmul in a jaxpr, those inside kernels included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from matmul_precisions(getattr(inner, "jaxpr", inner))


def is_jaxpr(x):
    return hasattr(x, "eqns")


@pytest.mark.parametrize(("backward", "num_matmuls"), [("split", 2 + 4 + 3), ("fused", 2 + 5)])
def test_float32_is_multiplied_in_full_precision_forward_and_backward(backward, num_matmuls):
    """On a CPU both precisions give the same numbers; on a TPU the default one rounds operands to bfloat16."""
    found = list(matmul_precisions(trace(CausalMask(), 512, dtype=jnp.float32, backward=backward).jaxpr))
    assert len(found) == num_matmuls
    assert set(found) == {(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)}


@pytest.mark.parametrize("mask", [m for m in MASKS if m.exact], ids=repr)
def test_no_pair_is_evaluated_ahead_of_time(mask, monkeypatch):
    """Whatever the mask is called on while tracing is traced itself: the kernel's own tile."""
    called_on = []

    def leaf_types(mask):
        return set().union(*map(leaf_types, mask.parts)) if mask.parts else {type(mask)}

    for leaf_type in leaf_types(mask):
        call = leaf_type.__call__

        def watched(self, q_pos, kv_pos, call=call):
            called_on.extend([q_pos, kv_pos])
            return call(self, q_pos, kv_pos)

        monkeypatch.setattr(leaf_type, "__call__", watched)
    trace(mask, 4096 + 512)
    assert called_on or mask == FullMask()
    assert all(isinstance(positions, jax.core.Tracer) for positions in called_on)


@pytest.mark.parametrize("mask", [CausalMask(), CausalMask() & LocalMask(4095, 0), CausalMask() | PrefixMask(1024)])
def test_memory_to_trace_does_not_grow_with_the_square_of_the_length(mask):
    """The arrays that hold the plan do grow with the number of tiles; 131,072² booleans would be 17 GB."""
    rise = {}
    for length in (4096, 131_072):
        _grid.cache_clear()
        tracemalloc.start()
        trace(mask, length)
        rise[length] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert rise[131_072] - rise[4096] < 100 << 20


def test_upstreams_passes_still_take_what_they_are_given():
    """They aren't public: where this fails on a new JAX, `passes.py` is to follow it."""
    expected = {
        "_splash_attention_forward": "fwd_mask_info q k v segment_ids sinks mask_value is_mqa block_sizes "
        "residual_checkpoint_name save_residuals mask_function attn_logits_soft_cap interpret",
        "_splash_attention_bwd_dkv": "q k v segment_ids sinks logsumexp do di bq bkv bkv_compute is_mqa mask_info "
        "mask_value attn_logits_soft_cap use_fused_bwd_kernel q_layout k_layout v_layout mask_function interpret",
        "_splash_attention_bwd_dq": "q k v segment_ids sinks logsumexp do di bq bkv is_mqa mask_info mask_value "
        "attn_logits_soft_cap q_layout k_layout v_layout mask_function interpret",
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(upstream, name)).parameters) == parameters.split()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(CausalMask(), dtype=jnp.float16), "takes bfloat16 and float32, not float16"),
        (call_of(CausalMask(), has_key_value_positions=True), "has no key_value_positions"),
        (
            call_of(NumpyMask(np.ones((64, 64), bool)), 64, has_query_positions=True),
            "at positions that are known on the device only",
        ),
        (
            call_of(CausalMask(), 1 << 20),
            r"its grid of 1024×1024 tiles takes 3,145,728 bytes of scalar memory, which has room for 983,040; use",
        ),
    ],
)
def test_refusals(call, reason):
    with pytest.raises(ValueError, match=f"implementation='splash' can't serve this call: .*{reason}"):
        select_backend(call, "splash")
    assert select_backend(call).name == "blockwise"


def test_long_sequences_get_larger_tiles_and_windows_stay_small():
    assert tuning.resolve(None, call_of(CausalMask(), 1 << 17)).block_q == 512
    assert tuning.resolve(None, call_of(CausalMask(), 1 << 19)).block_q == 1024
    assert tuning.resolve(None, call_of(LocalMask(4095, 0), 1 << 20)).block_q == 512
    assert tuning.resolve(None, call_of(CausalMask(), target=Target("tpu", "TPU v6 lite"))).block_q == 1024


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_q": 100}, "block_q=100 is not a positive multiple of 128; use 128"),
        ({"block_kv_dq": 0}, "block_kv_dq=0 is not a positive multiple of 128"),
        ({"block_kv_compute": 384}, "block_kv_compute=384 doesn't divide block_kv=512"),
        ({"backward": "both"}, "backward='both' must be 'split' or 'fused'"),
    ],
)
def test_tunings_validate_themselves(sizes, message):
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    defaults = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), 512)
    with pytest.raises(ValueError, match=message):
        SplashTuning(**(defaults | sizes))
