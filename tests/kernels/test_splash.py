"""Properties of the splash backend beyond values: the tiles that it visits, the cost of tracing, and refusals."""

import functools
import inspect
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info_lib

from kernels import (
    Bounds,
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
from kernels.backends.splash import passes, tuning
from kernels.backends.splash.tile_grid import _visited_steps, next_visited
from kernels.call import AttentionCall, AttentionInputs

TPU = Target("tpu", "TPU v5")
INTERPRETED = SplashTuning.square(128, interpret=True)
SPLASH = BACKENDS[0]
NO_TOKENS = passes.Tokens()

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
    yield tuning.forward_pass(call, splash_tuning)
    yield tuning.backward_dkv_pass(call, splash_tuning)
    if splash_tuning.backward == "split":
        yield tuning.backward_dq_pass(call, splash_tuning)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("kv_len", [2048, 1900])
def test_the_same_tiles_as_upstream_in_every_pass(mask, kv_len, backward):
    """Tile by tile against JAX's own MaskInfo, made from the dense mask."""
    call = call_of(mask, kv_len=kv_len)
    sizes = SplashTuning(256, 128, 128, 128, 256, 128, 256, 512, backward=backward)
    for walk in all_passes(call, sizes):
        padded = [-(-length // block) * block for length, block in ((2048, walk.block_q), (kv_len, walk.block_kv))]
        q_pos, kv_pos = np.arange(padded[0])[:, None], np.arange(padded[1])[None]
        dense = upstream.mask_lib.NumpyMask(mask.evaluate(q_pos, kv_pos) & (kv_pos < kv_len))
        process = mask_info_lib.process_mask_dkv if walk.transposed else mask_info_lib.process_mask
        heads, blocks = upstream.mask_lib.MultiHeadMask([dense] * 2), (walk.block_q, walk.block_kv)
        theirs, _ = process(heads, blocks, shrink_grid=walk.shrunk)
        ours = passes.planned_mask(call, walk, NO_TOKENS).info
        visited = np.asarray(theirs.block_mask) > 0
        np.testing.assert_array_equal(np.asarray(ours.block_mask) > 0, visited)
        if mask.exact:
            np.testing.assert_array_equal(ours.block_mask, theirs.block_mask)
        np.testing.assert_array_equal(np.asarray(ours.data_next)[visited], np.asarray(theirs.data_next)[visited])


def test_next_visited_names_the_following_step_and_then_the_first(rng):
    for density in (0.0, 0.1, 0.5, 1.0):
        visited = rng.random((3, 5, 7)) < density
        values = rng.integers(0, 100, (3, 5, 7))
        for namespace in (np, jnp):
            found = next_visited(namespace.asarray(values), namespace.asarray(visited))
            assert isinstance(found, np.ndarray if namespace is np else jax.Array)
            for mask in range(3):
                flat, value = visited[mask].reshape(-1), values[mask].reshape(-1)
                following = [next((k for k in range(step, 35) if flat[k]), flat.argmax()) for step in range(35)]
                np.testing.assert_array_equal(np.asarray(found[mask]).reshape(-1), value[following])


@pytest.mark.parametrize("transposed", [False, True])
def test_documents_skip_the_tiles_between_them(transposed):
    call = call_of(CausalMask(), 1024, has_segment_ids=True)
    ids = jnp.asarray(np.repeat([1, 2, 3], [384, 256, 384]))
    sizes = SplashTuning.square(128)
    walk = tuning.backward_dkv_pass(call, sizes) if transposed else tuning.forward_pass(call, sizes)
    info = passes.planned_mask(call, walk, passes.Tokens(ids, ids)).info
    alone = passes.planned_mask(call, walk, NO_TOKENS).info
    assert int((np.asarray(alone.block_mask) > 0).sum()) == 8 * 9 // 2
    assert int((np.asarray(info.block_mask) > 0).sum()) == 3 * 4 // 2 + 2 * 3 // 2 + 3 * 4 // 2


TREE = {"q_end": np.repeat([1024, 512, 768, 1024], 256)}
SHIFTED_WINDOW = {"k_start": np.arange(1024) - 300, "k_end": np.arange(1024) - 99}


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("bounds", [TREE, SHIFTED_WINDOW], ids=["tree", "shifted_window"])
def test_bounds_skip_the_tiles_that_they_empty(bounds, backward):
    """Also the holes of a row, as between the siblings of a tree. Against all pairs."""
    bounds = Bounds(**{name: jnp.asarray(x.clip(0, 1024), jnp.int32) for name, x in bounds.items()})
    call = call_of(CausalMask(), 1024, bounds=bounds.given)
    pairs = np.tri(1024, dtype=bool) & np.asarray(bounds.allowed(1024, 1024))
    expected = [(0, int(i), int(j)) for i, j in np.argwhere(pairs.reshape(8, 128, 8, 128).any(axis=(1, 3)))]
    assert len(expected) < 8 * 9 // 2
    for walk in all_passes(call, SplashTuning.square(128, backward=backward)):
        info = passes.planned_mask(call, walk, passes.Tokens(bounds=bounds)).info
        assert visited_tiles(info, walk.transposed) == expected


def visited_tiles(info, transposed):
    """(mask, query tile, key/value tile) of each visited step."""
    tile_kinds, tiles = np.asarray(info.block_mask), np.asarray(info.data_next)
    steps = [(int(m), int(i), int(j)) for m, i, j in np.argwhere(tile_kinds > 0)]
    return sorted((m, tiles[m, i, j], j) if transposed else (m, i, tiles[m, i, j]) for m, i, j in steps)


@pytest.mark.sample(10)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        CausalMask(),
        CausalMask() & LocalMask(300, 0),
        MaskFn(lambda q_pos, kv_pos: kv_pos < q_pos, classify_fn=CausalMask(-1).classify),
        MultiHeadMask([CausalMask() & LocalMask(150, 0), CausalMask()]),
    ],
    ids=["causal", "window", "function", "two_masks"],
)
@pytest.mark.parametrize("keys", ["counting", "sharded"])
def test_the_tiles_visited_at_given_positions_are_those_with_a_pair(keys, mask, with_documents, transposed, rng):
    """A zigzag shard of the queries, against NumPy pair by pair. Rows of tiles are intervals: where the keys' tiles are
    out of order, all between the first and the last of a row are visited."""
    length, kv_len, block_q, block_kv = 512, 1000, 128, 256
    shards = np.arange(1024).reshape(4, 256)
    q_pos = np.concatenate([shards[1], shards[2]])
    runs = np.arange(1024).reshape(4, 256)
    kv_pos = np.concatenate(rng.permutation(runs) if keys == "sharded" else runs)[:kv_len]
    ids = {"query_segment_ids": q_pos // 384, "key_value_segment_ids": kv_pos // 384} if with_documents else {}
    call = call_of(mask, length, kv_len=kv_len, has_query_positions=True, has_key_value_positions=True)
    call = call._replace(has_segment_ids=with_documents)
    sizes = SplashTuning(block_q, block_kv, block_kv, block_q, block_kv, block_kv, block_q, block_kv)
    walk = tuning.backward_dkv_pass(call, sizes) if transposed else tuning.forward_pass(call, sizes)
    positions = {"query_positions": q_pos, "key_value_positions": kv_pos}
    tokens = passes.Tokens(**jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), ids | positions))
    found = visited_tiles(jax.jit(lambda tokens: passes.planned_mask(call, walk, tokens).info)(tokens), transposed)

    expected = []
    for m, each in enumerate(dict.fromkeys(mask.for_each_head(2))):
        allowed = np.asarray(each(q_pos[:, None], kv_pos[None]))
        if with_documents:
            allowed &= ids["query_segment_ids"][:, None] == ids["key_value_segment_ids"][None]
        for i in range(length // block_q):
            for j in range(-(-kv_len // block_kv)):
                if allowed[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv].any():
                    expected.append((m, i, j))
    assert set(expected) <= set(found)
    if keys == "counting":
        assert set(expected) == set(found)


@pytest.mark.parametrize("transposed", [False, True])
def test_heads_with_few_tiles_load_no_more_for_sharing_a_grid(transposed):
    """A window's steps beyond its own name the tile that is loaded already, or the next one."""
    mask = MultiHeadMask([CausalMask(), CausalMask() & LocalMask(255, 0)])
    call = call_of(mask, 2048)
    sizes = SplashTuning.square(128)
    walk = tuning.backward_dkv_pass(call, sizes) if transposed else tuning.forward_pass(call, sizes)
    made = passes.planned_mask(call, walk, NO_TOKENS)
    assert made.mask_of_head == (0, 1)
    tables = np.asarray(made.info.data_next), np.asarray(made.info.block_mask)
    tiles, tile_kinds = (table.swapaxes(1, 2) if transposed else table for table in tables)
    assert tiles.shape == (2, 16, 16)
    visited = (tile_kinds > 0).sum(axis=(1, 2))
    assert list(visited) == [16 * 17 // 2, 16 * 3 - 3]
    loads = 1 + (np.diff(tiles.reshape(2, -1), axis=1) != 0).sum(axis=1)
    assert (loads <= visited).all()


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
        _visited_steps.cache_clear()
        tracemalloc.start()
        trace(mask, length)
        rise[length] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert rise[131_072] - rise[4096] < 100 << 20


def kernels_in(jaxpr):
    """Number of Pallas kernels in a jaxpr."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "pallas_call"
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            count += kernels_in(getattr(inner, "jaxpr", inner)) if is_jaxpr(inner) else 0
    return count


def test_heads_with_different_masks_share_one_kernel_in_each_pass():
    two_masks = MultiHeadMask([CausalMask(), CausalMask() & LocalMask(700, 0)])
    assert kernels_in(trace(two_masks, 2048).jaxpr) == kernels_in(trace(CausalMask(), 2048).jaxpr) == 3


def test_upstreams_kernels_still_take_what_they_are_given():
    """They aren't public: where this fails on a new JAX, `launch.py` is to follow it."""
    expected = {
        "flash_attention_kernel": "data_next_ref block_mask_ref mask_next_ref q_ref k_ref v_ref q_segment_ids_ref "
        "kv_segment_ids_ref sinks_ref mask_ref q_sequence_ref m_scratch_ref l_scratch_ref o_scratch_ref "
        "o_ref logsumexp_ref mask_value grid_width bq bkv bkv_compute head_dim_v q_layout k_layout "
        "v_layout attn_logits_soft_cap mask_function",
        "_flash_attention_dq_kernel": "data_next_ref block_mask_ref mask_next_ref q_ref k_ref v_ref q_segment_ids_ref "
        "kv_segment_ids_ref sinks_ref logsumexp_ref do_ref di_ref mask_ref q_sequence_ref dq_scratch_ref "
        "dq_ref mask_value grid_width bq bkv attn_logits_soft_cap q_layout k_layout v_layout "
        "mask_function",
        "_flash_attention_dkv_kernel": "data_next_ref block_mask_ref mask_next_ref q_ref k_ref v_ref q_segment_ids_ref "
        "kv_segment_ids_ref sinks_ref logsumexp_ref do_ref di_ref mask_ref q_sequence_ref dq_scratch_ref "
        "dk_scratch_ref dv_scratch_ref dq_ref dk_ref dv_ref num_q_heads num_kv_heads mask_value "
        "grid_width bq bkv_compute is_mqa attn_logits_soft_cap q_layout k_layout v_layout bkv "
        "mask_function",
    }
    for name, parameters in expected.items():
        # By name: JAX 0.12 has some in another order.
        assert set(inspect.signature(getattr(upstream, name)).parameters) == set(parameters.split())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(CausalMask(), dtype=jnp.float16), "takes bfloat16 and float32, not float16"),
        (
            call_of(NumpyMask(np.ones((64, 64), bool)), 64, has_query_positions=True),
            "at positions that are known on the device only",
        ),
        (
            call_of(NumpyMask(np.ones((64, 64), bool)), 64, bounds=("k_end",)),
            r"can't look NumpyMask\(.*\) up beside bounds",
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
