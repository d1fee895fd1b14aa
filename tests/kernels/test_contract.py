"""The attention contract: every backend, every case, values and gradients, against the reference."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    BlockwiseTuning,
    Bounds,
    LocalMask,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    NumpyMask,
    PrefixMask,
    SplashTuning,
    Target,
    TritonTiles,
    TritonTuning,
    dot_product_attention,
)
from tests.kernels.contract_cases import CASES, CAUSAL, SPOILED, WIDE, Case, has_fused_backward
from tests.kernels.late_warpgroups import lateness
from tests.kernels.spelled_out import allowed_keys, spelled_out


def value_and_gradients(attend, arrays, cotangents, *, with_lse):
    """Output, lse (or None) and the gradients of query, key, value and sinks (if there are any)."""
    given = [x for x in arrays if x is not None]
    result, vjp = jax.vjp(lambda *given: attend(*given, *[None] * (len(arrays) - len(given))), *given)
    output, lse = result if with_lse else (result, None)
    d_output = cotangents[0].astype(output.dtype)
    # A row that attends to nothing has lse −inf, whose cotangent means nothing.
    d_lse = None if lse is None else jnp.where(jnp.isfinite(lse), cotangents[1], 0).astype(lse.dtype)
    return output, lse, vjp((d_output, d_lse) if with_lse else d_output)


def compiled_value_and_gradients(attend, arrays, keywords, cotangents, *, with_lse):
    attend = functools.partial(attend, keywords=keywords)
    return jax.jit(functools.partial(value_and_gradients, attend, with_lse=with_lse))(arrays, cotangents)


@functools.cache
def compiled_reference(case, with_lse):
    """A case's reference, compiled once for all the backends that are held to it: with the keywords traced, too."""

    @jax.jit
    def run(arrays, traced_keywords, cotangents):
        keywords = {"scale": case.scale, "logits_soft_cap": case.logits_soft_cap, **traced_keywords}
        attend = functools.partial(through_implementation(case, "reference", with_lse=with_lse), keywords=keywords)
        return value_and_gradients(attend, arrays, cotangents, with_lse=with_lse)

    return run


def assert_close(actual, expected, dtype):
    """Within a few roundings of the largest element, and equal where infinite."""
    epsilon = float(jnp.finfo(dtype).eps)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e))
        finite = np.isfinite(e)
        np.testing.assert_array_equal(a[~finite], e[~finite])
        largest = np.abs(e[finite]).max(initial=0)
        num_roundings = 64 if epsilon < 1e-4 else 4
        np.testing.assert_allclose(a[finite], e[finite], rtol=0, atol=num_roundings * epsilon * (1 + largest))


def run_case(case, rng, attend, *, dtype=jnp.float32, with_lse=True):
    arrays, keywords, cotangents = case.inputs(rng, dtype)
    actual = compiled_value_and_gradients(attend, arrays, keywords, cotangents, with_lse=with_lse)
    exact = [None if x is None else x.astype(jnp.float32) for x in arrays]
    traced_keywords = {name: x for name, x in keywords.items() if isinstance(x, jax.Array | Bounds)}
    expected = compiled_reference(case, with_lse)(exact, traced_keywords, cotangents)
    assert actual[0].dtype == dtype
    assert_close(actual, expected, dtype)


CLEAN, VALUE_IS_SPOILED = 0, 5  # elements of the batch


def run_spoiled_case(case, rng, attend, *, dtype=jnp.float32, with_lse=True, exact=False, empty_rows_leak=False):
    """NaN comes out where the definition has it and nowhere else; but kernels multiply whole tiles by weights of 0, so
    that a value's NaN may reach more of its element of the batch, and so may any NaN in the backward pass.

    Args:
      exact: whether no output but the definition's is NaN.
      empty_rows_leak: whether a value's NaN may reach queries that may attend to nothing, too.
    """
    arrays, keywords, cotangents = case.inputs(rng, dtype)
    output, lse, gradients = compiled_value_and_gradients(attend, arrays, keywords, cotangents, with_lse=with_lse)
    expected_output, expected_lse = spelled_out(*arrays, case.mask, keywords)
    assert np.isnan(expected_lse).any()
    if case.segments is None:
        assert not np.isfinite(expected_output[VALUE_IS_SPOILED]).all(), "no query sees the value"
    if with_lse:
        assert_close(lse, expected_lse, dtype)
    leaks = np.arange(case.batch) == VALUE_IS_SPOILED
    is_empty = expected_lse == -np.inf
    output = np.asarray(output, np.float64)
    if empty_rows_leak:
        is_empty &= ~leaks[:, None, None]
    assert (output[is_empty] == 0).all()
    not_finite = ~np.isfinite(expected_output)
    assert not np.isfinite(output[not_finite]).any(), "a NaN or an infinity is hidden"
    compared = ~not_finite if exact else ~not_finite & ~leaks[:, None, None, None]
    assert_close(output[compared], expected_output[compared], dtype)

    d_query, d_key, d_value, *d_sinks = (np.asarray(x, np.float64) for x in gradients)
    assert not np.isfinite(d_query[not_finite.all(-1)]).any()
    for b, t, n in np.argwhere(np.isnan(expected_lse)):
        allowed = allowed_keys(b, t, n, case.q_len, case.kv_len, case.mask, keywords)
        for gradient in (d_key, d_value):
            assert not np.isfinite(gradient[b, allowed, n // (case.num_heads // case.num_kv_heads)]).any()
    assert not np.isfinite(d_sinks).any()
    if not case.sinks:
        assert all(np.isfinite(x[CLEAN]).all() for x in (d_query, d_key, d_value))


def through_implementation(case, implementation, *, with_lse=True):
    def attend(query, key, value, sinks, *, keywords):
        return dot_product_attention(
            query, key, value, case.mask, sinks=sinks, implementation=implementation, return_lse=with_lse, **keywords
        )

    return attend


def vmapped(attend):
    """Attends to one element of the batch at a time, under `jax.vmap`."""

    def attend_under_vmap(query, key, value, sinks, *, keywords):
        def one(*arrays):
            return tuple(x[0] for x in attend(*(x[None] for x in arrays), sinks, keywords=keywords))

        return jax.vmap(one)(query, key, value)

    return attend_under_vmap


def named(*names):
    return [case for case in CASES if case.name in names]


WIDE_TILES = named("causal", "per_head_within_groups", "ragged_no_mask", "packed", "everything")


@pytest.mark.parametrize(
    ("case", "block"),
    [(case, (32, 16)) for case in CASES] + [(case, (16, 48)) for case in WIDE_TILES],
    ids=lambda x: x.name if hasattr(x, "name") else str(x),
)
def test_blockwise_in_small_tiles(case, block, rng):
    run_case(case, rng, through_implementation(case, BlockwiseTuning(*block)))


@pytest.mark.parametrize("case", named("one_query", "everything"), ids=lambda case: case.name)
def test_blockwise_in_its_own_tiles(case, rng):
    run_case(case, rng, through_implementation(case, "blockwise"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", named("grouped_query", "everything"), ids=lambda case: case.name)
def test_blockwise_in_sixteen_bits(case, dtype, rng):
    run_case(case, rng, through_implementation(case, "blockwise"), dtype=dtype)


SPOILED_OF_CUDNN = [case for case in SPOILED if case.name == "spoiled_causal"]
by_name = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "name", x))


@by_name("case", SPOILED[:3])
def test_the_reference_hides_no_nan_and_leaks_none(case, rng):
    run_spoiled_case(case, rng, through_implementation(case, "reference"), exact=True)


@by_name("case", SPOILED[:3])
def test_blockwise_hides_no_nan(case, rng):
    run_spoiled_case(case, rng, through_implementation(case, BlockwiseTuning(16, 8)))


@pytest.mark.gpu
@by_name("case", SPOILED_OF_CUDNN)
def test_cudnn_hides_no_nan(case, rng):
    attend = through_implementation(case, "cudnn", with_lse=False)
    run_spoiled_case(case, rng, attend, dtype=jnp.bfloat16, with_lse=False)


CUDNN_CASES = {
    "no_mask",
    "causal",
    "window",
    "grouped_query",
    "multi_query",
    "one_head",
    "wide_head",
    "scale",
    "tiny_scale",
    "uneven_logits",
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cudnn(case, rng):
    attend = through_implementation(case, "cudnn", with_lse=False)
    if case.name in CUDNN_CASES:
        run_case(case, rng, attend, dtype=jnp.bfloat16, with_lse=False)
    else:
        with pytest.raises(ValueError, match="implementation='cudnn' can't serve this call"):
            run_case(case, rng, attend, dtype=jnp.bfloat16, with_lse=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blockwise_on_a_gpu_in_bfloat16(case, rng):
    run_case(case, rng, through_implementation(case, "blockwise"), dtype=jnp.bfloat16)


SPLASH = SplashTuning.square(128, interpret=True)
# The table's cases fit into one tile of 128; these, three times as long, skip tiles, too.
LONG = [
    dataclasses.replace(case, q_len=3 * case.q_len + 1, kv_len=3 * case.kv_len + 1)
    for case in named(
        "causal",
        "window",
        "chunked",
        "complement",
        "mask_fn",
        "per_head",
        "prefix_language_model",
        "cross",
        "empty_rows",
        "packed",
        "scattered_segments",
        "context_shard",
        "permuted_positions",
        "everything",
        "value_dim",
        "all_bounds",
        "bounds_of_keys",
        "tree",
        "tree_in_documents",
        "image_blocks",
        "bounds_of_a_gap",
        "bounds_per_head",
        "everything_bounded",
    )
]


IN_ONE_TILE = [case for case in CASES if case.name not in {long.name for long in LONG}]
# The fused backward walks its own grid and adds dQ up outside of the kernel; masks reach it as they do the split one.
FUSED = [
    case
    for case in LONG
    if case.name
    in (
        "window",
        "per_head",
        "cross",
        "packed",
        "everything",
        "all_bounds",
        "tree_in_documents",
        "bounds_per_head",
        "everything_bounded",
    )
]
# The forward and dK/dV take these in parts of a tile, but for the second and the last, whose keys have numbers.
IN_SEVERAL_SIZES = [
    case for case in LONG if case.name in ("scattered_segments", "everything", "image_blocks", "bounds_of_keys")
]


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", IN_ONE_TILE, ids=lambda case: case.name)
def test_splash_in_one_tile(case, rng):
    run_case(case, rng, through_implementation(case, SPLASH))


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_splash_in_many_tiles(case, rng):
    run_case(case, rng, through_implementation(case, SPLASH))


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_splash_with_the_fused_backward(case, rng):
    run_case(case, rng, through_implementation(case, dataclasses.replace(SPLASH, backward="fused")))


@pytest.mark.parametrize("case", IN_SEVERAL_SIZES, ids=lambda case: case.name)
def test_splash_in_tiles_of_several_sizes(case, rng):
    sizes = SplashTuning(128, 256, 128, 256, 256, 128, 256, 128, interpret=True)
    run_case(case, rng, through_implementation(case, sizes))


def test_splash_looks_up_no_pairs_of_a_full_tile_that_documents_cut(rng):
    case = Case("looked_up", NumpyMask(np.tri(289, dtype=bool)), q_len=289, kv_len=289, segments="packed")
    run_case(case, rng, through_implementation(case, SPLASH))


@by_name(("case", "backward", "dtype"), [(SPOILED[0], "split", jnp.float32), (SPOILED[1], "fused", jnp.bfloat16)])
def test_splash_hides_no_nan(case, backward, dtype, rng):
    run_spoiled_case(
        case, rng, through_implementation(case, dataclasses.replace(SPLASH, backward=backward)), dtype=dtype
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", named("grouped_query", "sinks", "packed"), ids=lambda case: case.name)
def test_splash_in_bfloat16(case, rng):
    run_case(case, rng, through_implementation(case, SPLASH), dtype=jnp.bfloat16)


# Several tiles to a row, so that rows have holes and tiles without a mask.
BOUNDED = [
    dataclasses.replace(case, q_len=3 * case.q_len + 1, kv_len=3 * case.kv_len + 1)
    for case in CASES
    if case.bounds is not None
]
OTHERS_BOUNDED = [case for case in BOUNDED if case not in LONG]
MOSAIC_GPU_REFUSES = {"numpy_mask", "negative_scale"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("backward", ["fused", "split"])
@pytest.mark.parametrize("case", CASES + LONG + OTHERS_BOUNDED + WIDE, ids=lambda case: f"{case.name}-{case.q_len}")
def test_mosaic_gpu(case, backward, dtype, rng):
    attend = through_implementation(case, MosaicGpuTuning(backward))
    if case.name in MOSAIC_GPU_REFUSES:
        with pytest.raises(ValueError, match=r"can't serve this call: (evaluates masks in the kernel|takes positive)"):
            run_case(case, rng, attend, dtype=dtype)
    elif backward == "fused" and not has_fused_backward(case.head_dim, case.value_dim or case.head_dim):
        with pytest.raises(ValueError, match="fused backward for head dims up to 128"):
            run_case(case, rng, attend, dtype=dtype)
    else:
        run_case(case, rng, attend, dtype=dtype)


@pytest.mark.gpu
@by_name("dtype", [jnp.bfloat16, jnp.float16])
@by_name("backward", ["fused", "split"])
@by_name("case", SPOILED)
def test_mosaic_gpu_hides_no_nan(case, backward, dtype, rng):
    attend = through_implementation(case, MosaicGpuTuning(backward))
    run_spoiled_case(case, rng, attend, dtype=dtype, empty_rows_leak=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in CASES + LONG + OTHERS_BOUNDED if case.name not in MOSAIC_GPU_REFUSES],
    ids=lambda case: f"{case.name}-{case.q_len}",
)
@pytest.mark.parametrize("backward", ["fused", "split"])
def test_mosaic_gpu_in_persistent_programs(case, backward, rng):
    block_q = 128 if case.head_dim <= 64 else 64
    backward_tiles = MosaicBackwardTuning(block_q=block_q, num_l2_heads=3, persistent=True)
    tuning = MosaicGpuTuning(backward, MosaicForwardTuning(persistent=True), backward_tiles)
    run_case(case, rng, through_implementation(case, tuning), dtype=jnp.bfloat16)


# Far more blocks than a GPU has multiprocessors.
MANY_BLOCKS = Case(
    "many_blocks", CAUSAL, q_len=1100, kv_len=1100, num_heads=32, num_kv_heads=8, head_dim=64, segments="packed"
)


# Two out of three keys are seen by no query.
MANY_EMPTY_BLOCKS = dataclasses.replace(
    MANY_BLOCKS, name="many_empty_blocks", q_len=700, kv_len=2100, head_dim=128, segments=None
)

FEW_EMPTY_BLOCKS = dataclasses.replace(
    MANY_EMPTY_BLOCKS, name="few_empty_blocks", q_len=70, kv_len=330, num_heads=4, num_kv_heads=2, head_dim=32
)


@pytest.mark.gpu
@pytest.mark.parametrize("num_warpgroups", [1, 2, 3])
def test_mosaic_gpu_in_persistent_programs_of_many_blocks(num_warpgroups, rng):
    tuning = MosaicGpuTuning(
        forward_tiles=MosaicForwardTuning(num_warpgroups, 64, num_stages=3, persistent=True, num_l2_heads=3)
    )
    run_case(MANY_BLOCKS, rng, through_implementation(MANY_BLOCKS, tuning), dtype=jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [MANY_BLOCKS, MANY_EMPTY_BLOCKS], ids=lambda case: case.name)
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize(
    ("backward", "num_warpgroups", "block_q", "head_dim"),
    # Tiles of 128 queries of wide heads don't fit.
    [
        ("fused", 1, 64, 128),
        ("fused", 2, 64, 64),
        ("fused", 2, 64, 128),
        ("fused", 2, 128, 64),
        ("split", 3, 64, 128),
        ("split", 2, 128, 64),
    ],
)
def test_mosaic_gpu_backward_in_persistent_programs_of_many_blocks(
    backward, num_warpgroups, block_q, head_dim, group_size, case, rng
):
    case = dataclasses.replace(case, num_heads=64, num_kv_heads=64 // group_size, head_dim=head_dim)
    num_blocks = case.batch * case.num_kv_heads * -(-case.kv_len // (64 * num_warpgroups))
    assert num_blocks > 2 * Target.of().num_multiprocessors
    tiles = MosaicBackwardTuning(num_warpgroups, block_q, num_l2_heads=3, persistent=True)
    attend = through_implementation(case, MosaicGpuTuning(backward, backward_tiles=tiles))
    run_case(case, rng, attend, dtype=jnp.bfloat16)


@pytest.mark.gpu
def test_mosaic_gpu_in_persistent_programs_under_vmap(rng):
    case = dataclasses.replace(MANY_BLOCKS, segments=None)
    attend = through_implementation(
        case, MosaicGpuTuning(forward_tiles=MosaicForwardTuning(persistent=True, num_l2_heads=3))
    )

    run_case(case, rng, vmapped(attend), dtype=jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["fused", "split"])
@pytest.mark.parametrize(("num_warpgroups", "block_q"), [(1, 64), (2, 128)])
@pytest.mark.parametrize(
    "case", [case for case in LONG if case.name != "numpy_mask"], ids=lambda case: f"{case.name}-{case.q_len}"
)
def test_mosaic_gpu_with_three_heads_at_once(case, num_warpgroups, block_q, backward, rng):
    tiles = MosaicBackwardTuning(num_warpgroups, block_q, num_l2_heads=3)
    tuning = MosaicGpuTuning(backward, MosaicForwardTuning(1, num_l2_heads=3), tiles)
    run_case(case, rng, through_implementation(case, tuning), dtype=jnp.bfloat16)


INTERPRETED = MosaicGpuTuning("split", MosaicForwardTuning(1, 64), MosaicBackwardTuning(1), interpret=True)


@pytest.mark.sample(4)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    "case",
    named("everything", "mask_fn", "packed", "per_head_within_groups", "ragged_no_mask", "uneven_logits", "value_dim")
    + [dataclasses.replace(case, q_len=260, kv_len=260) for case in WIDE if case.name == "full_tile_first"],
    ids=lambda case: case.name,
)
def test_mosaic_gpu_interpreted(case, rng):
    run_case(case, rng, through_implementation(case, INTERPRETED), dtype=jnp.bfloat16)


@pytest.mark.sample(4)
@pytest.mark.jax_0_11
@by_name("case", BOUNDED)
def test_mosaic_gpu_interpreted_within_bounds(case, rng):
    run_case(case, rng, through_implementation(case, INTERPRETED), dtype=jnp.bfloat16)


@pytest.mark.jax_0_11
def test_mosaic_gpu_interpreted_hides_no_nan(rng):
    run_spoiled_case(
        SPOILED[1], rng, through_implementation(SPOILED[1], INTERPRETED), dtype=jnp.bfloat16, empty_rows_leak=True
    )


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize("case", named("everything", "packed", "value_dim"), ids=lambda case: case.name)
def test_mosaic_gpu_interpreted_otherwise_tuned(case, rng):
    otherwise = dataclasses.replace(
        INTERPRETED,
        forward_tiles=MosaicForwardTuning(2, 64, persistent=True, num_l2_heads=1),
        backward_tiles=MosaicBackwardTuning(one_gradient_per_warpgroup=True, num_l2_heads=1),
    )
    run_case(case, rng, through_implementation(case, otherwise), dtype=jnp.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize("case", [case for case in WIDE if case.name.startswith("latent")], ids=lambda case: case.name)
def test_mosaic_gpu_interpreted_at_two_head_dims(case, rng):
    tuning = dataclasses.replace(INTERPRETED, backward_tiles=MosaicBackwardTuning())
    small = dataclasses.replace(case, batch=1, q_len=case.q_len // 2, kv_len=case.kv_len // 2, num_heads=2)
    small = dataclasses.replace(small, num_kv_heads=min(2, case.num_kv_heads))
    run_case(small, rng, through_implementation(small, tuning), dtype=jnp.bfloat16)


def persistent_and_interpreted(num_warpgroups: int) -> MosaicGpuTuning:
    return dataclasses.replace(
        INTERPRETED, backward_tiles=MosaicBackwardTuning(num_warpgroups, num_l2_heads=1, persistent=True)
    )


@pytest.mark.sample(2)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("name", "num_warpgroups"),
    [("everything", 2), ("packed", 1), ("per_head_within_groups", 2), ("value_dim", 1), ("few_empty_blocks", 2)],
)
def test_mosaic_gpu_interpreted_in_persistent_programs(name, num_warpgroups, rng):
    case = FEW_EMPTY_BLOCKS if name == FEW_EMPTY_BLOCKS.name else named(name)[0]
    run_case(case, rng, through_implementation(case, persistent_and_interpreted(num_warpgroups)), dtype=jnp.bfloat16)


@pytest.mark.jax_0_11
def test_a_persistent_programs_producer_may_be_late(rng, monkeypatch):
    tuning, late = persistent_and_interpreted(1), lateness(monkeypatch, warpgroup=1)
    run_case(FEW_EMPTY_BLOCKS, rng, through_implementation(FEW_EMPTY_BLOCKS, tuning), dtype=jnp.bfloat16)
    assert next(late) > 10


INTERPRETED_TRITON = TritonTuning(
    forward=TritonTiles(32, 16), key_value=TritonTiles(16, 32), query=TritonTiles(32, 32), interpret=True
)
EVERY_FEATURE = Case(
    "every_feature", (CAUSAL | PrefixMask(12)) & LocalMask(60, 9), batch=2, num_heads=4, num_kv_heads=2, q_len=61,
    kv_len=85, head_dim=20, value_dim=8, scale=0.3, logits_soft_cap=3.0, sinks=True, segments="packed",
    positions="permuted",
)  # fmt: skip
# Masks some of whose rows allow several intervals of keys, or none that is known in closed form; and a scale.
TRITON_REFUSES = {
    "complement", "mask_fn", "numpy_mask", "permuted_positions", "everything", "negative_scale", "bounds_of_a_gap",
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("backward", ["fused", "split"])
@pytest.mark.parametrize(
    "case", CASES + LONG + OTHERS_BOUNDED + WIDE + [EVERY_FEATURE], ids=lambda case: f"{case.name}-{case.q_len}"
)
def test_triton(case, backward, dtype, rng):
    attend = through_implementation(case, TritonTuning(backward))
    if case.name in TRITON_REFUSES:
        with pytest.raises(ValueError, match=r"(needs masks that allow each query one interval of keys|takes pos)"):
            run_case(case, rng, attend, dtype=dtype)
    else:
        run_case(case, rng, attend, dtype=dtype)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed: it is for Linux alone")
@pytest.mark.parametrize(
    ("case", "backward"),
    [(EVERY_FEATURE, "fused"), (EVERY_FEATURE, "split")]
    + [(case, "split") for case in named("per_head_within_groups", "empty_rows", "packed_no_mask")],
    ids=lambda x: getattr(x, "name", x),
)
def test_triton_interpreted(case, backward, rng):
    tuning = dataclasses.replace(INTERPRETED_TRITON, backward=backward)
    run_case(case, rng, through_implementation(case, tuning), dtype=jnp.float16)


@pytest.mark.sample(3)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed: it is for Linux alone")
@by_name("backward", ["fused", "split"])
@by_name("case", BOUNDED)
def test_triton_interpreted_within_bounds(case, backward, rng):
    tiles = TritonTiles(32, 32)
    tuning = TritonTuning(backward, forward=tiles, key_value=tiles, query=TritonTiles(64, 32), interpret=True)
    attend = through_implementation(case, tuning)
    if case.name in TRITON_REFUSES:
        with pytest.raises(ValueError, match="needs masks that allow each query one interval of keys"):
            run_case(case, rng, attend, dtype=jnp.float16)
    else:
        run_case(case, rng, attend, dtype=jnp.float16)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed: it is for Linux alone")
@by_name("backward", ["fused", "split"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 2400), (2400, 40)], ids=["of keys", "of queries"])
def test_triton_visits_no_tile_in_a_hole(q_len, kv_len, backward, rng):
    """A row has FULL tiles before and after the hole, which is longer than the 128 tiles that a kernel looks at."""
    case = Case("hole", batch=1, q_len=q_len, kv_len=kv_len, num_heads=1, num_kv_heads=1)
    (query, key, value, _), _, (d_output, _) = case.inputs(rng, jnp.float16)
    index = np.arange(2400)
    in_hole = (index >= 64) & (index < 2240)
    bounds = {"q_end" if kv_len > q_len else "k_end": jnp.asarray(np.where(in_hole, 0, 40))}

    def run(implementation, filling, dtype):
        def filled(x):
            return jnp.where(in_hole[:, None, None], filling, x) if x.shape[1] == len(index) else x

        attend = functools.partial(dot_product_attention, bounds=Bounds(**bounds), implementation=implementation)
        output, vjp = jax.vjp(attend, *(filled(x).astype(dtype) for x in (query, key, value)))
        return output, vjp(filled(d_output).astype(dtype))

    actual = run(dataclasses.replace(INTERPRETED_TRITON, backward=backward), jnp.nan, jnp.float16)
    assert_close(actual, run("reference", 0, jnp.float32), jnp.float16)


@pytest.mark.gpu
@by_name("dtype", [jnp.bfloat16, jnp.float16])
@by_name("backward", ["fused", "split"])
@by_name("case", SPOILED)
def test_triton_hides_no_nan(case, backward, dtype, rng):
    run_spoiled_case(case, rng, through_implementation(case, TritonTuning(backward)), dtype=dtype, empty_rows_leak=True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed: it is for Linux alone")
def test_triton_interpreted_hides_no_nan(rng):
    tuning = dataclasses.replace(INTERPRETED_TRITON, backward="split")
    run_spoiled_case(
        SPOILED[1], rng, through_implementation(SPOILED[1], tuning), dtype=jnp.float16, empty_rows_leak=True
    )


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", np.float32),
        (BlockwiseTuning(32, 32), np.float32),
        (SPLASH, np.float32),
        pytest.param(
            INTERPRETED_TRITON,
            np.float16,
            marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux alone"),
        ),
        pytest.param(MosaicGpuTuning(), np.float16, marks=pytest.mark.gpu),
        pytest.param(TritonTuning(), np.float16, marks=pytest.mark.gpu),
        pytest.param("cudnn", np.float16, marks=pytest.mark.gpu),
    ],
    ids=lambda x: getattr(x, "backend", x if isinstance(x, str) else None),
)
def test_cotangents_may_be_numpys(implementation, dtype, rng):
    x = jnp.asarray(rng.standard_normal((1, 64, 1, 64)), dtype)
    cotangent = rng.standard_normal(x.shape).astype(dtype)

    @jax.jit
    def gradient(x, same_cotangent):
        _, vjp = jax.vjp(lambda x: dot_product_attention(x, x, x, CAUSAL, implementation=implementation), x)
        return vjp(cotangent) + vjp(same_cotangent)

    np.testing.assert_allclose(*gradient(x, cotangent), rtol=1e-3, atol=1e-2)


FUSED_QKV = [*named("grouped_query", "packed"), *(case for case in WIDE if case.name == "wide_packed")]


def run_fused_qkv(case, rng, tuning):
    from kernels.attention.fused_qkv import attend_fused_qkv

    def attend(query, key, value, sinks, *, keywords):
        qkv = jnp.concatenate([query, key, value], axis=2)
        return attend_fused_qkv(
            qkv, case.num_kv_heads, case.mask, segment_ids=keywords.get("query_segment_ids"), tuning=tuning
        )

    run_case(case, rng, attend, dtype=jnp.float16, with_lse=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FUSED_QKV, ids=lambda case: case.name)
def test_triton_of_a_fused_projection(case, rng):
    run_fused_qkv(case, rng, TritonTuning())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed: it is for Linux alone")
def test_triton_of_a_fused_projection_interpreted(rng):
    run_fused_qkv(FUSED_QKV[0], rng, INTERPRETED_TRITON)


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [MosaicGpuTuning("split"), TritonTuning("split")], ids=lambda x: x.backend)
def test_the_split_backward_gives_the_same_bits_every_time(tuning, rng):
    (case,) = (case for case in WIDE if case.name == "wide_packed")
    arrays, keywords, cotangents = case.inputs(rng, jnp.bfloat16)
    attend = through_implementation(case, tuning)
    first, *others = [
        compiled_value_and_gradients(attend, arrays, keywords, cotangents, with_lse=True) for _ in range(5)
    ]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
