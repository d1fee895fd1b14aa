"""FlashAttention-3 as a contender: what it is asked for, by a stand-in that follows its package's documentation."""

import dataclasses
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.attention import peers
from experiments.benchmarks.attention.__main__ import AttentionArguments, measure
from experiments.benchmarks.attention.accuracy import errors_of, quantities, truth
from experiments.benchmarks.attention.cases import Case, make_problem
from experiments.benchmarks.attention.contenders import compile_contender
from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, PrefixMask, Target

SMALL = Case(2, 96, 4, 2, 16, CausalMask(), "float32")
ONCE = {"num_rounds": 1, "sample_ms": 0, "program_ms": 0}


def flash_mha(query, key, value, softmax_scale=None, is_causal=False, window_size=(-1, -1), sinks=None):
    """Dense attention by the words of the package's README."""
    assert softmax_scale is None
    if key.shape != value.shape:
        raise ValueError(f"flash_mha takes key and value of one shape, not {key.shape} and {value.shape}")
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    # The last query is at the last key.
    distance = jnp.arange(key.shape[1]) - jnp.arange(query.shape[1])[:, None] - (key.shape[1] - query.shape[1])
    left, right = window_size
    allowed = (distance <= 0) | (not is_causal)
    allowed &= ((distance >= -left) | (left == -1)) & ((distance <= right) | (right == -1))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[3])
    logits = jnp.where(allowed, logits, -jnp.inf)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sinks], axis=3)
    weights = jax.nn.softmax(logits)[..., : key.shape[1]]
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def flash_mha_varlen(query, key, value, cu_seqlens, max_seqlen, **how):
    """One sequence after another."""
    assert (cu_seqlens.dtype, cu_seqlens[0], cu_seqlens[-1]) == (np.int32, 0, len(query))
    assert max_seqlen == np.diff(cu_seqlens).max()
    sequences = [slice(begin, end) for begin, end in itertools.pairwise(cu_seqlens)]
    return jnp.concatenate([flash_mha(query[None, x], key[None, x], value[None, x], **how)[0] for x in sequences])


@pytest.fixture
def package(monkeypatch):
    """The stand-in, on a device that passes for a Hopper GPU."""
    module = types.ModuleType("dew_flash_attn")
    module.flash_mha, module.flash_mha_varlen = flash_mha, flash_mha_varlen
    monkeypatch.setitem(sys.modules, "dew_flash_attn", module)
    monkeypatch.setattr(peers, "_needs_hopper", lambda: None)
    return module


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mask": FullMask()},
        {"mask": LocalMask(19, 0)},
        {"mask": LocalMask(19, 7)},
        {"mask": LocalMask(19, None)},
        {"mask": CausalMask(offset=5)},
        {"mask": FullMask(), "kv_length": 192},
        {"has_sinks": True},
        {"mask": LocalMask(19, 0), "has_sinks": True},
        {"document_length": 20, "document_spread": 1.0},
        {"mask": FullMask(), "document_length": 20},
        {"document_length": 1000},
        {"mask": LocalMask(9, 0), "document_length": 30, "has_sinks": True},
    ],
    ids=repr,
)
def test_it_computes_the_case(change, package):
    problem = make_problem(dataclasses.replace(SMALL, **change))
    errors, refused = errors_of(problem, "fa3", truth(problem))
    assert refused is None
    assert tuple(errors) == quantities(problem.case)
    assert {name: error for name, error in errors.items() if error.largest > 1e-4} == {}


def test_it_is_timed_and_checked_beside_ours(package):
    rows = measure("small", SMALL, AttentionArguments(backends=("fa3", "blockwise"), **ONCE))
    assert [row["backend"] for row in rows if row["direction"] == "backward"] == ["fa3", "blockwise"]
    assert all(row["speed_ratios"].keys() == {"fa3", "blockwise"} for row in rows)
    checked = AttentionArguments(backends=("blockwise", "fa3"), baseline="fa3", check=True)
    ours, theirs = measure("small", SMALL, checked)
    assert theirs["error_ratios"] == dict.fromkeys(quantities(SMALL), 1)
    assert ours["error_ratios"]["output"] == ours["errors"]["output"]["rms"] / theirs["errors"]["output"]["rms"]


@pytest.mark.parametrize(
    "mask", [PrefixMask(7), ChunkedCausalMask(32), CausalMask(offset=-1), CausalMask() | PrefixMask(7)]
)
def test_a_mask_that_it_has_no_window_for_is_refused(mask, package):
    with pytest.raises(
        ValueError, match="has full masks, causal masks and windows around each query only, "
    ) as refusal:
        compile_contender(make_problem(dataclasses.replace(SMALL, mask=mask)), "fa3", "forward")
    assert str(refusal.value).endswith(f"not {mask!r}")


def test_what_the_package_refuses_is_told_in_its_words(package):
    case = dataclasses.replace(SMALL, value_dim=8)
    (refused, *_) = measure("small", case, AttentionArguments(backends=("fa3", "blockwise"), **ONCE))
    assert refused["refused"].startswith("flash_mha takes key and value of one shape, not (2, 96, 2, 16) and ")


def test_without_the_package_the_row_says_how_to_get_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "dew_flash_attn", None)
    (refused,) = measure("small", SMALL, AttentionArguments(backends=("fa3",), **ONCE))
    expected = "ModuleNotFoundError: fa3 needs dew-flash-attn-cu13: pip install -e '.[peers]' in the clone"
    assert refused["refused"] == expected


def test_other_gpus_would_run_flash_attention_2(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(Target, "of", lambda: Target("gpu", "NVIDIA A100", 8.0, 108))
    with pytest.raises(ValueError, match=r"is for Hopper GPUs \(compute capability 9.0\), not for NVIDIA A100 .*8.0"):
        peers._needs_hopper()
    monkeypatch.setattr(Target, "of", lambda: Target("gpu", "NVIDIA H100", 9.0, 132))
    peers._needs_hopper()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mask": FullMask(), "kv_length": 5000},
        {"mask": LocalMask(127, 0), "head_dim": 64, "has_sinks": True},
        {"head_dim": 256},
        {"document_length": 200, "document_spread": 1.0},
    ],
    ids=repr,
)
def test_the_package_itself_computes_the_case(change):
    if Target.of().compute_capability != 9.0:
        pytest.skip(f"FlashAttention-3 is for Hopper GPUs, not for {Target.of().device_kind}")
    pytest.importorskip("dew_flash_attn", exc_type=ImportError)
    problem = make_problem(dataclasses.replace(Case(2, 1024, 16, 2, 128, CausalMask()), **change))
    errors, refused = errors_of(problem, "fa3", truth(problem))
    assert refused is None
    assert {name: error for name, error in errors.items() if error.rms > 0.05} == {}
