"""Errors against attention in float64: how they are measured, and on a GPU, that ours are no worse than cuDNN's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.attention import contenders
from experiments.benchmarks.attention.__main__ import AttentionArguments, measure
from experiments.benchmarks.attention.accuracy import Error, error, errors_of, quantities, truth
from experiments.benchmarks.attention.cases import Case, make_problem
from kernels import CausalMask, FullMask, LocalMask, MosaicGpuTuning, dot_product_attention

SMALL = Case(2, 256, 2, 1, 16, CausalMask(), "float32")
PACKED = dataclasses.replace(SMALL, document_length=60, document_spread=0.5)
GROUPED = dataclasses.replace(SMALL, num_heads=4, num_kv_heads=2)
WINDOWED = dataclasses.replace(SMALL, mask=LocalMask(39, 0))
SUNK = dataclasses.replace(GROUPED, has_sinks=True)
NARROW_VALUES = dataclasses.replace(GROUPED, value_dim=8)
MORE_KEYS = dataclasses.replace(SMALL, mask=FullMask(), kv_length=512)


@pytest.mark.parametrize("case", [PACKED, GROUPED, WINDOWED, SUNK, NARROW_VALUES, MORE_KEYS], ids=repr)
def test_the_truth_in_parts_is_that_of_the_whole(case, float64):
    # Three parts of 32 queries.
    problem = make_problem(case, 96)
    arrays = [jnp.asarray(problem.arrays[name], jnp.float64) for name in (*case.inputs, "d_output")]
    ids = {"query_segment_ids": problem.segment_ids, "key_value_segment_ids": problem.segment_ids}

    def attend(query, key, value, sinks=None):
        return dot_product_attention(query, key, value, case.mask, sinks=sinks, **ids, implementation="reference")

    output, vjp = jax.vjp(attend, *arrays[:-1])
    found = truth(problem)
    assert {name: x.dtype for name, x in found.items()} == dict.fromkeys(quantities(case), np.float64)
    for (name, x), expected in zip(found.items(), (output, *vjp(arrays[-1])), strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-13 if name == "output" else 1e-12)


def test_an_error_is_relative_to_the_truth(rng):
    expected = rng.normal(size=(3, 5))
    assert error(expected, expected) == Error(0, 0)
    assert error(1.5 * expected, expected) == pytest.approx((0.5, 0.5))
    spike = np.zeros_like(expected)
    spike[1, 2] = -abs(expected).max()
    assert error(expected + spike, expected).largest == pytest.approx(1)


def test_errors_tell_a_rounded_result_from_a_wrong_one(monkeypatch):
    def wrong(query, key, value, sinks, segment_ids, problem):
        return contenders.dot_product_attention(query, key, value, FullMask(), implementation="blockwise")

    monkeypatch.setitem(contenders.PEERS, "wrong", wrong)
    case = dataclasses.replace(SMALL, dtype="bfloat16")
    checked = AttentionArguments(backends=("blockwise", "wrong", "torch_flex", "xla"), check=True, check_length=128)
    blockwise, bad, unchecked, xla = measure("small", case, checked)
    assert blockwise["length"] == 128
    for quantity in quantities(case):
        assert 1e-4 < blockwise["errors"][quantity]["rms"] < 1e-2 < 0.1 < bad["errors"][quantity]["rms"]
    rms = (row["errors"]["d_key"]["rms"] for row in (blockwise, xla))
    assert blockwise["error_ratios"]["d_key"] == next(rms) / next(rms)
    assert (unchecked["errors"], "isn't checked" in unchecked["refused"]) == ({}, True)


def test_the_gradient_of_sinks_is_checked_too(monkeypatch):
    def heedless(query, key, value, sinks, segment_ids, problem):
        sinks = jax.lax.stop_gradient(sinks)
        return contenders.dot_product_attention(query, key, value, problem.case.mask, sinks=sinks)

    monkeypatch.setitem(contenders.PEERS, "heedless", heedless)
    problem = make_problem(SUNK)
    expected = truth(problem)
    right, _ = errors_of(problem, "blockwise", expected)
    wrong, _ = errors_of(problem, "heedless", expected)
    assert list(right) == list(wrong) == ["output", "d_query", "d_key", "d_value", "d_sinks"]
    assert {name for name in right if right[name].rms > 1e-4} == set()
    assert {name for name in wrong if wrong[name].rms > 1e-4} == {"d_sinks"}
    assert wrong["d_sinks"].rms == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["fused", "split"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2048, 4, 4, 64, CausalMask()),
        Case(1, 2048, 4, 4, 128, CausalMask()),
        Case(1, 2048, 4, 4, 128, FullMask()),
        Case(1, 2048, 4, 4, 128, LocalMask(511, 0)),
        Case(1, 2048, 8, 2, 128, CausalMask(), "float16"),
        Case(1, 2048, 8, 2, 256, CausalMask()),
        Case(1, 32_768, 2, 2, 128, CausalMask()),
        Case(1, 32_768, 2, 2, 128, LocalMask(4095, 0)),
        Case(1, 32_768, 8, 2, 64, CausalMask()),
    ],
    ids=repr,
)
def test_errors_are_no_worse_than_cudnns(case, backward):
    problem = make_problem(case)
    expected = truth(problem)
    theirs, refused = errors_of(problem, "cudnn", expected)
    assert refused is None
    ours, refused = errors_of(problem, MosaicGpuTuning(backward), expected)
    if refused is not None and "fused backward for head dims" in refused:
        pytest.skip(refused)
    assert refused is None
    worse = {name: (ours[name].rms, theirs[name].rms) for name in ours if ours[name].rms > 1.1 * theirs[name].rms}
    assert worse == {}
