"""Errors against attention in float64: how they are measured, and on a GPU, that ours are no worse than cuDNN's."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.benchmarks.attention import contenders
from experiments.benchmarks.attention.__main__ import AttentionArguments, measure
from experiments.benchmarks.attention.accuracy import Error, error, errors_of, quantities, truth
from experiments.benchmarks.attention.cases import Case, make_problem
from kernels import CausalMask, FullMask, LocalMask, MosaicGpuTuning

SMALL = Case(2, 256, 2, 1, 16, CausalMask(), "float32")
PACKED = dataclasses.replace(SMALL, document_length=60, document_spread=0.5)
GROUPED = dataclasses.replace(SMALL, num_heads=4, num_kv_heads=2)
WINDOWED = dataclasses.replace(SMALL, mask=LocalMask(39, 0))
SUNK = dataclasses.replace(GROUPED, has_sinks=True)
NARROW_VALUES = dataclasses.replace(GROUPED, value_dim=8)
MORE_KEYS = dataclasses.replace(SMALL, mask=FullMask(), kv_length=512)


@pytest.mark.parametrize("case", [PACKED, GROUPED, WINDOWED, SUNK, NARROW_VALUES, MORE_KEYS], ids=repr)
def test_the_truth_is_attention_in_float64(case):
    # Three parts of 32 queries.
    problem = make_problem(case, 96)
    query, key, value, d_output = (
        np.asarray(problem.arrays[name], np.float64) for name in ("query", "key", "value", "d_output")
    )
    group, num_keys = case.num_heads // case.num_kv_heads, key.shape[1]
    assert num_keys == (192 if case is MORE_KEYS else 96)
    distance = np.arange(96)[:, None] - np.arange(num_keys)
    window = case.mask.left if isinstance(case.mask, LocalMask) else 96
    inside = (distance >= 0) & (distance <= window) | isinstance(case.mask, FullMask)
    allowed = np.broadcast_to(inside, (2, 96, num_keys))
    if problem.segment_ids is not None:
        ids = np.asarray(problem.segment_ids)
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])
    key, value = (np.repeat(x, group, 2) for x in (key, value))
    logits = np.where(allowed[:, None], np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(case.head_dim), -np.inf)
    sinks = np.asarray(problem.arrays.get("sinks", np.full(case.num_heads, -np.inf)), np.float64)[:, None, None]
    row_max = np.maximum(logits.max(-1, keepdims=True), sinks)
    weights, share = np.exp(logits - row_max), np.exp(sinks - row_max)
    weights, share = (x / (weights.sum(-1, keepdims=True) + share) for x in (weights, share))
    output = np.einsum("bnts,bsnh->btnh", weights, value)
    d_value = np.einsum("bnts,btnh->bsnh", weights, d_output).reshape(2, num_keys, -1, group, case.output_dim).sum(3)

    d_weights = np.einsum("btnh,bsnh->bnts", d_output, value)
    delta = (weights * d_weights).sum(-1, keepdims=True)
    d_logits = weights * (d_weights - delta) / np.sqrt(case.head_dim)
    d_query = np.einsum("bnts,bsnh->btnh", d_logits, key)
    d_key = np.einsum("bnts,btnh->bsnh", d_logits, query).reshape(2, num_keys, -1, group, case.head_dim).sum(3)

    arrays = {"output": output, "d_query": d_query, "d_key": d_key, "d_value": d_value}
    arrays |= {"d_sinks": -(share * delta).sum((0, 2, 3))} if case.has_sinks else {}
    found = truth(problem)
    assert {name: x.dtype for name, x in found.items()} == dict.fromkeys(quantities(case), np.float64)
    for name, array in arrays.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-13 if name == "output" else 1e-12)


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
