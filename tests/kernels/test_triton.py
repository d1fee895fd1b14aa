"""The Triton backend away from a GPU: masks as intervals of keys, tiles, what it refuses."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    Target,
    TritonTiles,
    TritonTuning,
    select_backend,
)
from kernels.backends.triton import key_intervals, support
from kernels.backends.triton.key_intervals import make_key_intervals
from kernels.backends.triton.tuning import least_shared_memory, resolve
from kernels.masks import TileKind
from kernels.plan import make_rows
from tests.kernels import gpu_calls

A100, TURING = Target("gpu", "NVIDIA A100", 8.0), Target("gpu", "NVIDIA T4", 7.5)
WINDOW = CausalMask() & LocalMask(40, 0)


call_of = functools.partial(gpu_calls.call_of, length=200, target=A100)

INTERVALS = [
    FullMask(),
    CausalMask(-7),
    LocalMask(9, 13),
    LocalMask(None, -3),
    ChunkedCausalMask(25),
    PrefixMask(40),
    CausalMask() | PrefixMask(30),
    (CausalMask() | PrefixMask(30)) & LocalMask(50, None) & ChunkedCausalMask(64),
    LocalMask(-30, 20),
]


@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
@pytest.mark.parametrize("longest", [90, 89], ids=["constant", "on the device"])
@pytest.mark.parametrize("mask", INTERVALS, ids=repr)
def test_intervals_of_keys_are_the_mask(mask, longest, given, rng, monkeypatch):
    monkeypatch.setattr(key_intervals, "_MOST_CONSTANT", longest)
    q_pos, kv_pos = np.arange(90)[None], np.arange(120)[None]
    positions = {}
    if given:
        q_pos, kv_pos = rng.integers(0, 500, (2, 90)), rng.integers(0, 500, (2, 120))
        positions = {"query_positions": jnp.asarray(q_pos), "key_value_positions": jnp.asarray(kv_pos)}
    inputs, call = call_of(mask, length=90, kv_len=120, **positions)
    intervals = make_key_intervals(inputs, call)
    constant = longest == 90 and not given
    assert all(isinstance(x, np.ndarray) == constant and x.dtype == jnp.int32 for x in intervals[:2])
    first, last, _ = (None if x is None else np.asarray(x)[..., None] for x in intervals)
    allowed = (first <= kv_pos[:, None]) & (kv_pos[:, None] <= last)
    np.testing.assert_array_equal(allowed, np.asarray(mask(q_pos[:, :, None], kv_pos[:, None])))
    assert last.max() < 120 or given, "no interval reaches past the last key"


@pytest.mark.parametrize(
    "mask",
    [
        ~WINDOW,
        LocalMask(10, 0) | PrefixMask(5),
        CausalMask() & ~LocalMask(30, -10),
        MaskFn(lambda q, kv: kv <= q),
        NumpyMask(np.tri(200, dtype=bool)),
    ],
    ids=repr,
)
def test_masks_with_gaps_or_without_a_closed_form_have_none(mask):
    assert not mask.has_row_intervals


def as_kinds(bounds, num_cols):
    """The kind of every tile, as a kernel that walks `bounds` treats it."""
    start, full_start, full_stop, stop = (np.asarray(bounds)[..., i, None] for i in range(4))
    col = np.arange(num_cols)
    full = (full_start <= col) & (col < full_stop)
    return np.where(full, TileKind.FULL, np.where((start <= col) & (col < stop), TileKind.PARTIAL, TileKind.EMPTY))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("documents", ["none", "packed", "scattered"])
@pytest.mark.parametrize("mask", [WINDOW, WINDOW & ~LocalMask(20, -10), MaskFn(lambda q, kv: kv <= q ^ 64)], ids=repr)
def test_walks_over_intervals_lose_no_pair(mask, documents, transposed, rng):
    ids = rng.integers(0, 4, (2, 256))
    ids = {"none": 0 * ids, "packed": np.sort(ids), "scattered": ids}[documents]
    given = {} if documents == "none" else {"query_segment_ids": ids, "key_value_segment_ids": ids}
    inputs, call = call_of(mask, length=256, **given)
    rows = make_rows(inputs, call, 32, 16, transposed=transposed, only_intervals=True)
    assert rows.tiles is None
    kinds = as_kinds(rows.bounds, 8 if transposed else 16)
    kinds = np.broadcast_to(kinds.swapaxes(1, 2) if transposed else kinds, (2, 8, 16))
    position = np.arange(256)
    allowed = mask(position[:, None], position) & (ids[:, :, None] == ids[:, None])
    tiles = allowed.reshape(2, 8, 32, 16, 16)
    assert not tiles.any((2, 4))[kinds == TileKind.EMPTY].any()
    assert tiles.all((2, 4))[kinds == TileKind.FULL].all()
    assert (kinds == TileKind.EMPTY).any(), "some tiles are skipped"


REFUSED = {
    "old GPU": ({"target": TURING}, "needs an NVIDIA GPU of compute capability 8.0, this one has 7.5"),
    "other GPU": ({"target": Target("gpu", "AMD MI300X")}, "needs an NVIDIA GPU, not AMD MI300X"),
    "float32": ({"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
    "head dim": ({"head_dim": 264}, "takes head dims up to 256, not 264"),
    "scale": ({"scale": -1.0, "logits_soft_cap": 5.0}, "takes positive scales, not -1.0"),
    "gaps": ({"mask": MultiHeadMask([WINDOW, ~WINDOW])}, "needs masks that allow each query one interval of keys"),
}


@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_with_the_reason_and_is_passed_over(given, reason):
    _, call = call_of(**given)
    with pytest.raises(ValueError, match=re.escape(reason)):
        select_backend(call, "triton")
    assert reason in dict(select_backend(call).passed_over)["triton"]


def test_says_which_package_is_missing(monkeypatch):
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None if name == "jax_triton" else name)
    with pytest.raises(ValueError, match=r"needs jax_triton, which isn't installed; pip install -e '\.\[cuda13\]'"):
        select_backend(call_of()[1], "triton")


def test_is_chosen_where_faster_backends_are_not(monkeypatch):
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: name)
    ids = jnp.zeros((2, 200), jnp.int32)
    selection = select_backend(call_of(query_segment_ids=ids, key_value_segment_ids=ids)[1])
    assert selection.name == "triton"
    assert dict(selection.passed_over)["cudnn"] == "has no segment ids"


@pytest.mark.parametrize(
    ("interpret", "dtype", "reason"),
    [("0", jnp.float16, "only if TRITON_INTERPRET=1 was set"), ("1", jnp.bfloat16, "in bfloat16")],
)
def test_says_what_cannot_be_interpreted(interpret, dtype, reason, monkeypatch):
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(ValueError, match=reason):
        select_backend(call_of(dtype=dtype)[1], TritonTuning(interpret=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(TritonTiles, 48, 64), "block_q=48 must be a power of two, at least 16"),
        (functools.partial(TritonTiles, 64, 8), "block_kv=8 must be a power of two, at least 16"),
        (functools.partial(TritonTiles, 64, 64, num_warps=3), "num_warps=3 must be a power of two, at least 1"),
        (functools.partial(TritonTiles, 64, 64, num_stages=0), "num_stages=0 must be at least 1"),
        (functools.partial(TritonTuning, "both"), "backward='both' must be 'fused', 'split' or None"),
    ],
)
def test_tunings_refuse_what_cannot_run(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_tunings_are_values():
    assert dataclasses.replace(TritonTiles(64, 64), num_stages=3) == TritonTiles(64, 64, num_stages=3)
    assert hash(TritonTuning()) == hash(TritonTuning())


H200 = Target("gpu", "NVIDIA H200", 9.0, 132)
KERNELS = {"_forward_kernel": "forward", "_key_value_kernel": "key_value", "_query_kernel": "query"}


COMPILES = """
import json, sys
import jax
from jax_triton import triton_lib
from kernels import CausalMask, TritonTiles, TritonTuning, Target
from kernels.backends import triton
from kernels.call import Cotangent
from tests.kernels.test_triton import KERNELS, call_of

compile_kernel, allocated = triton_lib.compile_ttir_inplace, []

def record(*args, **kwargs):
    result = compile_kernel(*args, **kwargs)
    allocated[-1][KERNELS[result.name]] = result.shared_mem_bytes
    return result

triton_lib.compile_ttir_inplace = record
for head_dim, capability, *tiles in json.loads(sys.argv[1]):
    target = Target("gpu", "a GPU", capability)
    inputs, call = call_of(CausalMask(), length=256, head_dim=head_dim, target=target)
    tuning = TritonTuning("split", *(TritonTiles(*each) for each in tiles))

    def run(inputs):
        output, lse = triton.fwd(inputs, call, tuning)
        return triton.bwd(inputs, call, tuning, Cotangent.of(output, lse, output))

    allocated.append({})
    jax.jit(run).trace(inputs).lower(lowering_platforms=("cuda",))
print(json.dumps(allocated))
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs jax_triton to compile")
def test_shared_memory_is_bounded_from_below(rng):
    """By what Triton allocates, compiled ahead of time: in a process of its own, since this one interprets kernels."""

    def tiles() -> list[int]:
        return [int(rng.choice(values)) for values in ([16, 32, 64, 128], [16, 32, 64, 128], [4, 8], [1, 2, 3, 4])]

    drawn = [
        (head_dim, capability, tiles(), tiles(), tiles()) for head_dim in (40, 64, 128) for capability in (8.0, 9.0)
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        (sys.executable, "-c", COMPILES, json.dumps(drawn)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    for (head_dim, capability, *each), allocated in zip(drawn, json.loads(process.stdout), strict=True):
        _, call = call_of(CausalMask(), head_dim=head_dim, target=Target("gpu", "a GPU", capability))
        tuning = TritonTuning("split", *(TritonTiles(*sizes) for sizes in each))
        least = least_shared_memory(call, tuning)
        assert least.keys() == allocated.keys()
        assert all(least[name] <= allocated[name] for name in least), (tuning, least, allocated)
        if capability == 9.0 and tuning.forward.block_q >= 64:
            assert least["forward"] == allocated["forward"]


@pytest.mark.parametrize(
    ("target", "head_dim", "tiles", "least", "available"),
    [
        (H200, 128, TritonTiles(128, 128, 8, 4), "294,912", "9.0 has 232,448"),
        (A100, 256, TritonTiles(64, 128, 4, 3), "262,144", "8.0 has 166,912"),
    ],
    ids=["H200", "A100"],
)
def test_a_named_tuning_that_does_not_fit_is_refused_with_the_remedy(
    target, head_dim, tiles, least, available, monkeypatch
):
    monkeypatch.setattr(support, "_compiler_missing", lambda: None)
    _, call = call_of(CausalMask(), head_dim=head_dim, target=target)
    expected = (
        f"forward={tiles} at head dim {head_dim} needs at least {least} bytes of shared memory, of which a GPU of "
        f"compute capability {available}; lower num_stages, block_q or block_kv"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        select_backend(call, TritonTuning(forward=tiles))


@pytest.mark.parametrize("head_dim", [8, 32, 64, 128, 192, 256])
@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0, 12.0, 12.1])
def test_the_tiles_of_every_gpu_are_not_refused(capability, head_dim, monkeypatch):
    monkeypatch.setattr(support, "_compiler_missing", lambda: None)
    for q_len in (200, 16384):
        _, call = call_of(CausalMask(), head_dim=head_dim, target=Target("gpu", "a GPU", capability))
        call = call._replace(q_len=q_len)
        assert select_backend(call, "triton").name == "triton"
        resolved = resolve(None, call)
        assert None not in dataclasses.astuple(resolved)
        assert select_backend(call, resolved).name == "triton"
