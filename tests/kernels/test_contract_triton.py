"""The attention contract on `triton`: on a GPU, and interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Bounds, LocalMask, PrefixMask, TritonTiles, TritonTuning, dot_product_attention
from tests.kernels.contract import (
    INTERPRETED_TRITON,
    assert_close,
    by_name,
    needs_triton,
    run_case,
    run_spoiled_case,
    through_implementation,
)
from tests.kernels.contract_cases import BOUNDED, CASES, CAUSAL, LONG, OTHERS_BOUNDED, SPOILED, WIDE, Case, named

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


@needs_triton
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
@needs_triton
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


@needs_triton
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


@needs_triton
def test_triton_interpreted_hides_no_nan(rng):
    tuning = dataclasses.replace(INTERPRETED_TRITON, backward="split")
    run_spoiled_case(
        SPOILED[1], rng, through_implementation(SPOILED[1], tuning), dtype=jnp.float16, empty_rows_leak=True
    )


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


@needs_triton
def test_triton_of_a_fused_projection_interpreted(rng):
    run_fused_qkv(FUSED_QKV[0], rng, INTERPRETED_TRITON)
