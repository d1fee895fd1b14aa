"""Hopper's backward of short, narrow heads: a program computes a whole head, whose dQ stays in shared memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.tune_attention.__main__ import tiles_to_begin_with
from kernels import (
    CausalMask,
    LocalMask,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    PrefixMask,
    Target,
)
from kernels.backends import mosaic_gpu
from kernels.backends.mosaic_gpu.shared_memory import shared_memory_excess
from kernels.backends.mosaic_gpu.tuning import FUSED, SPLIT, WHOLE_HEADS, resolve
from tests.kernels.contract_cases import CASES, CAUSAL, Case
from tests.kernels.gpu_calls import call_of
from tests.kernels.late_warpgroups import lateness
from tests.kernels.test_contract import run_case, through_implementation, value_and_gradients, vmapped

INTERPRETED = MosaicGpuTuning("fused", MosaicForwardTuning(1, 64), WHOLE_HEADS, interpret=True)
ON_A_GPU = MosaicGpuTuning(backward_tiles=WHOLE_HEADS)
by_case = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)

# Blocks of 128 keys without a step are the last ones here, by the causal mask, and some more by documents.
FEW_HEADS = Case(
    "few_heads", CAUSAL, q_len=100, kv_len=200, num_heads=3, num_kv_heads=3, head_dim=64, value_dim=40,
    segments="packed",
)  # fmt: skip
BLOCKS_WITHOUT_STEPS = [
    dataclasses.replace(FEW_HEADS, name=name, mask=mask, kv_len=400, segments=None)
    for name, mask in (
        ("none_in_the_first", CausalMask(300) & LocalMask(-200, 300)),
        ("none_in_the_second", PrefixMask(100) | ~CausalMask(300)),
        ("none_in_all", PrefixMask(0)),
    )
]


@pytest.mark.sample(2)
@pytest.mark.jax_0_11
@by_case([*(case for case in CASES if case.name in ("causal_offset", "packed", "soft_cap", "value_dim")), FEW_HEADS])
def test_in_the_interpreter(case, rng):
    run_case(case, rng, through_implementation(case, INTERPRETED), dtype=jnp.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@by_case(BLOCKS_WITHOUT_STEPS)
def test_blocks_that_no_query_sees_in_the_interpreter(case, rng):
    run_case(case, rng, through_implementation(case, INTERPRETED), dtype=jnp.float16)


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize("num_stages", [1, 3])
def test_other_numbers_of_stages_in_the_interpreter(num_stages, rng):
    tuning = dataclasses.replace(INTERPRETED, backward_tiles=dataclasses.replace(WHOLE_HEADS, num_stages=num_stages))
    case = dataclasses.replace(FEW_HEADS, mask=None, segments=None, batch=1)
    run_case(case, rng, through_implementation(case, tuning), dtype=jnp.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize("warpgroup", [0, 1, 2], ids=["consumer", "other consumer", "producer"])
def test_a_warpgroup_may_be_late(warpgroup, rng, monkeypatch):
    late = lateness(monkeypatch, warpgroup)
    run_case(FEW_HEADS, rng, through_implementation(FEW_HEADS, INTERPRETED), dtype=jnp.bfloat16)
    assert next(late) > 10


@pytest.mark.jax_0_11
def test_under_vmap_in_the_interpreter(rng):
    case = dataclasses.replace(FEW_HEADS, segments=None, num_heads=1, num_kv_heads=1)
    run_case(case, rng, vmapped(through_implementation(case, INTERPRETED)), dtype=jnp.bfloat16)


# More heads than a GPU has multiprocessors.
MANY_HEADS = dataclasses.replace(FEW_HEADS, name="many_heads", q_len=200, kv_len=390, num_heads=150, num_kv_heads=150)
ON_GPUS = [
    MANY_HEADS,
    dataclasses.replace(MANY_HEADS, name="one_document", segments=None),
    dataclasses.replace(MANY_HEADS, name="sinks", sinks=True),
    dataclasses.replace(MANY_HEADS, name="permuted", segments=None, positions="permuted"),
    dataclasses.replace(MANY_HEADS, name="longest", mask=None, segments=None, q_len=512, kv_len=512),
    *(dataclasses.replace(case, num_heads=150, num_kv_heads=150) for case in BLOCKS_WITHOUT_STEPS),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@by_case(ON_GPUS)
def test_on_a_gpu(case, dtype, rng):
    assert case.batch * case.num_heads > 2 * Target.of().num_multiprocessors
    run_case(case, rng, through_implementation(case, ON_A_GPU), dtype=dtype)


@pytest.mark.gpu
def test_the_same_bits_in_every_run(rng):
    arrays, keywords, cotangents = MANY_HEADS.inputs(rng, jnp.bfloat16)
    attend = functools.partial(through_implementation(MANY_HEADS, ON_A_GPU), keywords=keywords)
    run = jax.jit(functools.partial(value_and_gradients, attend, with_lse=True))
    first, *others = (jax.tree.leaves(run(arrays, cotangents)) for _ in range(5))
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.gpu
def test_under_vmap_on_a_gpu(rng):
    case = dataclasses.replace(MANY_HEADS, segments=None)
    run_case(case, rng, vmapped(through_implementation(case, ON_A_GPU)), dtype=jnp.bfloat16)


@pytest.mark.jax_0_11
def test_whole_heads_that_do_not_fit_are_refused():
    tuning, (_, call) = MosaicGpuTuning(backward_tiles=WHOLE_HEADS), call_of()
    assert mosaic_gpu.unsupported_reason(call, tuning) is None
    for changed, got in (
        (
            call._replace(q_len=520),
            "not for 520 queries, head dims of 64, 2 heads and 2 of keys; use whole_heads=False",
        ),
        (call._replace(num_heads=6), "not for 512 queries, head dims of 64, 6 heads and 2 of keys"),
    ):
        assert got in mosaic_gpu.unsupported_reason(changed, tuning)
    # The next number of tiles.
    excess = shared_memory_excess(call._replace(q_len=513), resolve(tuning, call))
    assert excess.endswith("bytes of shared memory, of which a Hopper GPU has 232,448; lower num_stages")


@pytest.mark.parametrize(
    ("changes", "is_whole"),
    [
        ({}, True),
        ({"q_len": 1, "kv_len": 1}, True),
        ({"q_len": 511}, False),
        ({"head_dim": 16, "value_dim": 40}, True),
        ({"q_len": 513, "kv_len": 513}, False),
        ({"kv_len": 513}, False),
        ({"head_dim": 65}, False),
        ({"value_dim": 65}, False),
        ({"num_heads": 4}, False),
    ],
    ids=repr,
)
def test_short_heads_are_computed_as_a_whole(changes, is_whole):
    call = call_of(CausalMask())[1]._replace(**changes)
    for tuning in (None, MosaicGpuTuning(), MosaicGpuTuning("fused")):
        resolved = resolve(tuning, call)
        assert (resolved.backward_tiles == WHOLE_HEADS) == is_whole
        assert resolved.backward == "fused" or not is_whole
    for tuning in (MosaicGpuTuning("split"), MosaicGpuTuning(interpret=True)):
        assert resolve(tuning, call).backward == "split"
    tiles = MosaicBackwardTuning(block_q=128)
    assert resolve(MosaicGpuTuning(backward_tiles=tiles), call).backward_tiles == tiles


def test_the_tables_have_tiles_for_longer_calls_alone():
    assert not any(tiles.whole_heads for table in (FUSED, SPLIT) for tiles in table.values())


@pytest.mark.jax_0_11
def test_the_search_begins_with_the_tables_tiles():
    call = call_of(CausalMask())[1]
    assert resolve(None, call).backward_tiles == WHOLE_HEADS
    assert tiles_to_begin_with("fused", call) in FUSED.values()
