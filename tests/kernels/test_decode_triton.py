"""Decoding in Triton: the kernels in Triton's interpreter and on a GPU, and what they refuse."""

import importlib.util
import re

import jax.numpy as jnp
import pytest

from kernels import (
    CausalMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    Target,
    TritonDecodeTuning,
    TritonTiles,
    decode_attention,
    select_backend,
)
from kernels.decode import triton
from kernels.decode.call import make_decode_call
from tests.kernels.decode_session import (
    CAUSAL,
    HEAD_DIM,
    HEADS,
    MASKS,
    NUM_COMPARED,
    NUM_SEQUENCES,
    WINDOW,
    Session,
    empty_cache,
    poisoned,
    run_session,
    strided,
    with_nan_key,
)

A100, TURING = Target("gpu", "NVIDIA A100", 8.0), Target("gpu", "NVIDIA T4", 7.5)
KEPT_BY_INTERVALS = [name for name in MASKS if name not in ("sink_tokens", "complement", "function")]


# So many that all of them aren't read.
MANY_SLOTS = 1 << 20


def call_of(mask=CAUSAL, *, dtype=jnp.bfloat16, block_size=16, target=A100, num_slots=MANY_SLOTS, scale=None):
    """A call as compiled for a target."""
    cache = empty_cache("slab", dtype, block_size=block_size)
    query = jnp.ones((NUM_SEQUENCES, 1, HEADS, HEAD_DIM), dtype)
    nothing = dict.fromkeys(("sequences", "query_positions", "logits_soft_cap", "sinks"))
    return make_decode_call(query, cache, mask, scale=scale, **nothing)[1]._replace(target=target, num_slots=num_slots)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", ["slab", "unified"])
@pytest.mark.parametrize("name", KEPT_BY_INTERVALS)
def test_a_session_on_the_gpu(name, form, dtype, rng):
    cache = empty_cache(form, dtype, block_size=16)
    session = Session(rng, cache, MASKS[name], implementations=("triton",), logits_soft_cap=3.0, sinks=jnp.ones(HEADS))
    run_session(session)
    assert session.compare(3e-2 if dtype == jnp.bfloat16 else 4e-3) == NUM_COMPARED


@pytest.mark.parametrize(
    ("form", "mask", "cap", "has_sinks"), [("slab", MASKS["per_head"], 3.0, True), ("unified", CAUSAL, None, False)]
)
def test_kernels_in_the_interpreter(form, mask, cap, has_sinks, rng):
    """Every kernel, against the blockwise form; neighbours' slots hold NaN and infinity, and one head's newest key."""
    package = pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, for x86 Linux")
    if not package.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 isn't set: the kernels are compiled, for a GPU")
    # Triton's interpreter multiplies bfloat16 as integers.
    session = Session(rng, empty_cache(form, jnp.float16, block_size=16), mask)
    session.cache = poisoned(session.cache)
    session.start({0: 20, 2: 24})
    query, _ = session.append({0: 3, 2: 3}, 3)
    session.cache = with_nan_key(session.cache, sequence=2)
    sinks = jnp.asarray(rng.standard_normal(HEADS), jnp.float32) if has_sinks else None
    (output, lse), (expected, expected_lse) = (
        decode_attention(
            query, session.cache, mask, scale=0.5, logits_soft_cap=cap, sinks=sinks, implementation=implementation,
            return_lse=True,
        )
        for implementation in (TritonDecodeTuning(num_programs=6, interpret=True), "blockwise")
    )  # fmt: skip
    assert (lse[1] == -jnp.inf).all(), "a sequence that doesn't run"
    assert jnp.isnan(expected_lse[2, -1, : HEADS // 2]).all(), "it isn't hidden"
    assert jnp.allclose(lse, expected_lse, atol=3e-3, equal_nan=True)
    assert jnp.allclose(output, expected, atol=3e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": Target("tpu", "TPU v5", None)}, "runs on gpu, not on tpu"),
        ({"target": Target("gpu", "AMD Instinct MI300X")}, "needs an NVIDIA GPU, not AMD Instinct MI300X"),
        ({"target": TURING}, "needs an NVIDIA GPU of compute capability 8.0, this one has 7.5"),
        ({"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
        (
            {"mask": MaskFn(strided)},
            "needs masks that allow each query one interval of keys, known in closed form",
        ),
        ({"mask": MultiHeadMask([CAUSAL] * 3 + [CausalMask() & ~WINDOW])}, "needs masks that allow each query"),
        ({"scale": 0}, "takes positive scales, not 0.0"),
        ({"block_size": 40}, "takes a block_size that is a multiple of 16, not 40"),
    ],
)
def test_refusals(change, reason, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    call = call_of(**change)
    with pytest.raises(ValueError, match=f"implementation='triton' can't serve this call: {re.escape(reason)}"):
        select_backend(call, "triton")
    selection = select_backend(call)
    assert selection.name == "blockwise"
    assert dict(selection.passed_over)["triton"].startswith(reason)


def test_a_small_cache_is_read_whole_on_gpus(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for small in (
        call_of(num_slots=160),
        call_of(dtype=jnp.float32, num_slots=64),
        call_of(num_slots=1280)._replace(one_slab=True),
        call_of(num_slots=1280)._replace(batch=1),
    ):
        assert select_backend(small) == ("dense", ())
    for large, name, reason in (
        (call_of(), "triton", "reads all 1048576 slots of each sequence; over 160, skipping blocks is faster"),
        (call_of(num_slots=1281)._replace(one_slab=True), "triton", "reads all 1281 slots in the slab; over 1280"),
        (
            call_of(num_slots=160)._replace(num_new=2000),
            "triton",
            "24000 query rows × 160 slots × 20 are 76800000 multiplications; over 12582912",
        ),
        (
            call_of(num_slots=64, target=Target("cpu", "cpu", None)),
            "blockwise",
            "is faster on GPUs only, not on cpu",
        ),
    ):
        selection = select_backend(large)
        assert selection.name == name
        assert dict(selection.passed_over)["dense"].startswith(reason)
    assert select_backend(call_of(), "dense").name == "dense", "who names it gets it"


def test_tiles_divide_a_block(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    call = call_of(block_size=48)
    assert select_backend(call, TritonDecodeTuning(TritonTiles(16, 16))).name == "triton"
    with pytest.raises(ValueError, match=r"takes tiles.block_kv that divides block_size=48, not 32"):
        select_backend(call, TritonDecodeTuning(TritonTiles(16, 32)))
    with pytest.raises(ValueError, match="num_programs=0 must be at least 1"):
        TritonDecodeTuning(num_programs=0)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = "needs triton, which isn't installed; pip install -e '.[cuda13]' in the clone"
    assert triton.unsupported_reason(call_of()) == missing
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert triton.unsupported_reason(call_of()) is None
    assert triton.unsupported_reason(call_of(LocalMask(3, 0))) is None
