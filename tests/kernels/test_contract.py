"""The attention contract on `reference`, `blockwise`, `cudnn` and `splash`; and what all backends hold alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import BlockwiseTuning, MosaicGpuTuning, NumpyMask, SplashTuning, TritonTuning, dot_product_attention
from tests.kernels.contract import (
    INTERPRETED_TRITON,
    SPLASH,
    by_name,
    compiled_value_and_gradients,
    needs_triton,
    run_case,
    run_spoiled_case,
    through_implementation,
)
from tests.kernels.contract_cases import CASES, CAUSAL, LONG, SPOILED, WIDE, Case, named

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


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", np.float32),
        (BlockwiseTuning(32, 32), np.float32),
        (SPLASH, np.float32),
        pytest.param(INTERPRETED_TRITON, np.float16, marks=needs_triton),
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
