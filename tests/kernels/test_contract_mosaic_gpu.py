"""The attention contract on `mosaic_gpu`: on a Hopper GPU, and interpreted."""

import dataclasses

import jax.numpy as jnp
import pytest

from kernels import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning, Target
from tests.kernels.contract import by_name, run_case, run_spoiled_case, through_implementation, vmapped
from tests.kernels.contract_cases import (
    BOUNDED,
    CASES,
    CAUSAL,
    LONG,
    OTHERS_BOUNDED,
    SPOILED,
    WIDE,
    Case,
    has_fused_backward,
    named,
)
from tests.kernels.late_warpgroups import lateness

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
