"""The Mosaic GPU backend away from a GPU: its kernels in Pallas's interpreter, its tunings, what it refuses."""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core

from kernels import (
    Bounds,
    CausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    NumpyMask,
    Target,
    dot_product_attention,
    select_backend,
)
from kernels.backends import BACKENDS, mosaic_gpu
from kernels.backends.mosaic_gpu import tuning as tunings
from kernels.backends.mosaic_gpu.shared_memory import shared_memory_bytes, shared_memory_excess
from kernels.backends.mosaic_gpu.tuning import TunedCall, resolve
from kernels.call import Cotangent, make_call
from tests.kernels.contract_cases import draw_bounds, has_fused_backward
from tests.kernels.gpu_calls import H200, call_of

ONE_GRADIENT = MosaicBackwardTuning(one_gradient_per_warpgroup=True)


REFUSED = {
    "another GPU": ({"target": Target("gpu", "NVIDIA A100", 8.0)}, "is for Hopper GPUs (compute capability 9.0)"),
    "float32": ({"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
    "head dim": ({"head_dim": 264}, "takes head dims up to 256, not 264"),
    "scale": ({"scale": -1.0}, "takes positive scales, not -1.0"),
    "array": ({"mask": NumpyMask(np.ones((512, 512), bool))}, "evaluates masks in the kernel"),
}


@pytest.mark.jax_0_11
@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_with_the_reason_and_is_passed_over(given, reason):
    _, call = call_of(**given)
    with pytest.raises(ValueError, match=re.escape(reason)):
        select_backend(call, "mosaic_gpu")
    selection = select_backend(call)
    assert selection.name != "mosaic_gpu"
    assert reason in dict(selection.passed_over)["mosaic_gpu"]


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("tuning", "head_dims", "reason"),
    [
        (
            MosaicGpuTuning(backward_tiles=MosaicBackwardTuning()),
            (192, 192),
            "takes backward_tiles without one_gradient_per_warpgroup for head dims up to 128, or 192 beside 128, not",
        ),
        (
            MosaicGpuTuning("fused"),
            (136, 192),
            "has a fused backward for head dims up to 128, or 192 beside 128, not 136 and 192; use backward='split'",
        ),
        (
            MosaicGpuTuning("split", backward_tiles=MosaicBackwardTuning(3)),
            (192, 128),
            r"= \(2, 64\) or with one_gradient_per_warpgroup above a head dim of 128, not \(3, 64\)",
        ),
        (
            MosaicGpuTuning(backward_tiles=MosaicBackwardTuning(persistent=True)),
            (192, 128),
            "takes persistent backward_tiles for head dims up to 128, not 192",
        ),
        (
            MosaicGpuTuning(forward_tiles=MosaicForwardTuning(persistent=True)),
            (192, 192),
            "takes persistent forward_tiles for head dims up to 128, not 192",
        ),
    ],
    ids=["backward", "fused", "three warpgroups", "persistent", "forward"],
)
def test_tiles_that_are_not_for_the_head_dims_are_refused(tuning, head_dims, reason):
    head_dim, value_dim = head_dims
    with pytest.raises(ValueError, match=reason):
        select_backend(call_of(head_dim=head_dim, value_dim=value_dim)[1], tuning)


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    "tuning",
    [
        MosaicGpuTuning("split", backward_tiles=MosaicBackwardTuning()),
        MosaicGpuTuning("fused", backward_tiles=MosaicBackwardTuning()),
        MosaicGpuTuning(backward_tiles=MosaicBackwardTuning(1)),
        MosaicGpuTuning(backward_tiles=MosaicBackwardTuning(block_q=128)),
        MosaicGpuTuning(backward_tiles=ONE_GRADIENT),
    ],
    ids=["split", "fused", "one warpgroup", "tall tiles", "one gradient each"],
)
def test_tiles_for_narrow_heads_are_taken(tuning):
    assert select_backend(call_of(head_dim=64)[1], tuning).name == "mosaic_gpu"


@pytest.mark.jax_0_11
def test_is_chosen_on_hopper():
    assert select_backend(call_of(MaskFn(lambda q, kv: kv <= q))[1]).name == "mosaic_gpu"


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="for JAX before 0.11")
def test_says_that_it_needs_a_newer_jax():
    with pytest.raises(ValueError, match=r"needs JAX 0\.11 or later"):
        select_backend(call_of()[1], "mosaic_gpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MosaicForwardTuning(num_warpgroups=4), "num_warpgroups=4 must be 1, 2 or 3"),
        (lambda: MosaicForwardTuning(block_kv=80), "block_kv=80 must be 64, 128, 192 or 256"),
        (lambda: MosaicForwardTuning(num_stages=0), "num_stages=0 must be at least 1"),
        (lambda: MosaicBackwardTuning(block_q=32), "block_q=32 must be 64 or 128"),
        (lambda: MosaicForwardTuning(num_l2_heads=0), "num_l2_heads=0 must be at least 1"),
        (lambda: MosaicBackwardTuning(num_l2_heads=0), "num_l2_heads=0 must be at least 1"),
        (
            lambda: MosaicBackwardTuning(3, one_gradient_per_warpgroup=True),
            "takes num_warpgroups=2 and num_stages of at least 2",
        ),
        (lambda: MosaicBackwardTuning(num_stages=1, one_gradient_per_warpgroup=True), "of at least 2, not 2 and 1"),
        (
            lambda: MosaicBackwardTuning(one_gradient_per_warpgroup=True, persistent=True),
            "one_gradient_per_warpgroup excludes persistent programs",
        ),
        (
            lambda: MosaicGpuTuning("fused", backward_tiles=ONE_GRADIENT),
            "can't take backward_tiles with one_grad",
        ),
        (lambda: MosaicGpuTuning("fused", backward_tiles=MosaicBackwardTuning(3)), "or (2, 128), not (3, 64)"),
        (lambda: MosaicGpuTuning(backward_tiles=MosaicBackwardTuning(1, 128)), "or (2, 128), not (1, 128)"),
        (lambda: MosaicGpuTuning("both"), "backward='both' must be 'fused', 'split' or None"),
        (lambda: MosaicGpuTuning("fused", interpret=True), "use backward='split'"),
    ],
)
def test_tunings_refuse_what_cannot_run(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_tunings_are_values():
    assert dataclasses.replace(MosaicForwardTuning(), num_stages=3) == MosaicForwardTuning(num_stages=3)
    assert hash(MosaicGpuTuning()) == hash(MosaicGpuTuning())


def random_call(rng, head_dim: int, value_dim: int):
    """A call that draws what its shared memory depends on."""
    numbers = jnp.zeros((2, 256), jnp.int32)
    given = {}
    if rng.integers(2):
        given |= {"query_segment_ids": numbers, "key_value_segment_ids": numbers}
    if rng.integers(2):
        given["query_positions"] = numbers
    if rng.integers(2):
        given["logits_soft_cap"] = 5.0
    return call_of(CausalMask(), length=256, head_dim=head_dim, value_dim=value_dim, **given)


def random_tuning(rng, head_dim: int, value_dim: int) -> MosaicGpuTuning:
    """A tuning whose kernels exist for the head dims, whether or not they fit."""
    widest, holds_both = max(head_dim, value_dim), has_fused_backward(head_dim, value_dim)

    def one_of(*values):
        return values[rng.integers(len(values))]

    fused, wide = holds_both and one_of(False, True), not holds_both or one_of(False, True)
    num_warpgroups, block_q = one_of((1, 64), (2, 64), (2, 128)) if fused else (one_of(1, 2, 3), one_of(64, 128))
    if widest > 128 and holds_both:
        num_warpgroups, block_q = 2, 64
    tiles_dq = {"block_kv_dq": one_of(64, 128), "num_stages_dq": one_of(1, 2, 3)}
    backward = (
        MosaicBackwardTuning(2, block_q, one_of(2, 3), one_gradient_per_warpgroup=True, **tiles_dq)
        if wide and not fused
        else MosaicBackwardTuning(
            num_warpgroups, block_q, one_of(1, 2, 3), persistent=widest <= 128 and one_of(False, True), **tiles_dq
        )
    )
    persistent = widest <= 128 and one_of(False, True)
    forward = MosaicForwardTuning(one_of(1, 2, 3), one_of(64, 128, 192, 256), one_of(1, 2, 3), True, persistent)
    return MosaicGpuTuning("fused" if fused else "split", forward, backward)


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("backward", "num_kernels"),
    # Forward and preprocess, and one for all gradients, or one for dK and dV and one for dQ.
    [("fused", 3), ("split", 4)],
)
def test_a_kernel_has_the_same_bytes_however_many_were_lowered_before_it(backward, num_kernels):
    inputs, call = call_of(CausalMask())
    tuning = resolve(MosaicGpuTuning(backward), call)

    def lower() -> str:
        def run(inputs):
            output, lse = mosaic_gpu.fwd(inputs, call, tuning)
            return mosaic_gpu.bwd(inputs, call, tuning, Cotangent.of(output, lse, output))

        return jax.jit(run).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()

    text = lower()
    assert text.count("mosaic_gpu_v2") == num_kernels
    zeros = f"tensor<{inputs.query.size // 1024}x1024xf32>"
    assert (zeros in text) == (backward == "fused")
    assert lower() == text


@pytest.mark.jax_0_11
@pytest.mark.parametrize(("length", "is_padded"), [(200, False), (204, True)])
@pytest.mark.parametrize("backward", ["fused", "split"])
def test_matrices_of_whole_eights_of_rows_are_not_copied(length, is_padded, backward):
    inputs, call = call_of(FullMask(), length=length)
    tuning = resolve(MosaicGpuTuning(backward), call)

    def run(inputs):
        output, lse = mosaic_gpu.fwd(inputs, call, tuning)
        return mosaic_gpu.bwd(inputs, call, tuning, Cotangent.of(output, lse, output))

    text = jax.jit(run).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    of_matrices = [line for line in text.splitlines() if "stablehlo.pad" in line and "x2x64xbf16" in line]
    assert bool(of_matrices) == is_padded


@pytest.mark.jax_0_11
def test_layers_that_are_alike_are_lowered_once():
    inputs, call = call_of(CausalMask())
    tuning = resolve(None, call)

    def layers(inputs):
        for _ in range(3):
            output, _ = mosaic_gpu.fwd(inputs, call, tuning)
            inputs = inputs._replace(query=output)
        return inputs.query

    text = jax.jit(layers).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.full
@pytest.mark.jax_0_11
def test_vmapped_kernels_compute_what_they_do_one_by_one(rng):
    inputs, call = call_of(CausalMask())
    ids = jnp.sort(jnp.asarray(rng.integers(0, 5, inputs.query.shape[:2]), jnp.int32))
    inputs = inputs._replace(query_segment_ids=ids, key_value_segment_ids=ids)
    call = call._replace(has_segment_ids=True)
    tuning = resolve(MosaicGpuTuning(interpret=True), call)

    def both(value):
        of_value = inputs._replace(value=value)
        output, lse = mosaic_gpu.fwd(of_value, call, tuning)
        cotangent = Cotangent.of(output, lse, output, jnp.zeros_like(lse))
        return output, lse, mosaic_gpu.bwd(of_value, call, tuning, cotangent)

    values = jnp.asarray(rng.standard_normal((2, *inputs.value.shape)), inputs.value.dtype)
    for found, *expected in zip(*map(jax.tree.leaves, (jax.vmap(both)(values), *map(both, values))), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_no_tile_of_keys_is_longer_than_the_backend_says():
    longest = next(backend.longest_tile for backend in BACKENDS if backend.name == "mosaic_gpu")
    backward = [MosaicBackwardTuning(1), MosaicBackwardTuning(3), ONE_GRADIENT, MosaicBackwardTuning(block_kv_dq=128)]
    assert max(max(tiles.block_kv, tiles.block_kv_dq) for tiles in backward) <= longest
    assert MosaicForwardTuning(block_kv=longest).block_kv == longest
    with pytest.raises(ValueError, match="must be 64, 128, 192 or 256"):
        MosaicForwardTuning(block_kv=2 * longest)


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    "tiles",
    [
        MosaicBackwardTuning(1),
        MosaicBackwardTuning(2, persistent=True, num_l2_heads=1),
        MosaicBackwardTuning(one_gradient_per_warpgroup=True),
    ],
    ids=["one block", "persistent", "one gradient"],
)
def test_keys_past_a_rows_last_are_neither_read_nor_differentiated(tiles, rng):
    q_len, kv_len = 64, 384
    # In the longest row, they fill blocks, or just begin one.
    num_keys = np.array([int(rng.integers(q_len, 128)), int(rng.choice([128, 129, 255, 256]))])
    query, d_output = (jnp.asarray(rng.standard_normal((2, q_len, 1, 64)), jnp.bfloat16) for _ in range(2))
    key, value = (jnp.asarray(rng.standard_normal((2, kv_len, 1, 64)), jnp.bfloat16) for _ in range(2))
    lse, delta = (jnp.asarray(rng.uniform(3, 6, (2, q_len, 1)), jnp.float32) for _ in range(2))
    positions = np.sort(rng.integers(0, num_keys[:, None], (2, q_len)), axis=1).astype(np.int32)

    drawn = draw_bounds(rng, "k_start k_end q_start q_end", 2, q_len, kv_len) if rng.integers(2) else Bounds()

    def gradients(key, value, num_keys):
        bounds = drawn.map(lambda bound: bound, lambda bound: bound[:, : key.shape[1]])
        inputs, call = make_call(
            query, key, value, CausalMask(), query_positions=positions, bounds=bounds, return_lse=True
        )
        call, inputs = call._replace(target=H200), inputs._replace(num_keys=num_keys)
        tuning = resolve(MosaicGpuTuning(backward_tiles=tiles, interpret=True), call)
        return mosaic_gpu.bwd(inputs, call, tuning, Cotangent(d_output, lse, delta))

    block = tiles.block_kv
    num_read = -(-num_keys.max() // block) * block
    expected = gradients(key[:, :num_read], value[:, :num_read], None)
    of_nothing = jnp.full_like(key[:, num_read:], jnp.nan)
    spoiled = (jnp.concatenate([x[:, :num_read], of_nothing], axis=1) for x in (key, value))
    found = gradients(*spoiled, jnp.asarray(num_keys[:, None], jnp.int32))
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_array_equal(one[:, : other.shape[1]], other)
        # The interpreter fills memory with NaN. What is left is what nobody wrote.
        assert np.isnan(one[:, other.shape[1] :]).all()


@pytest.mark.jax_0_11
def test_a_mask_whose_function_reads_other_numbers_is_traced_anew(rng):
    distance = [40]
    inputs, call = call_of(MaskFn(lambda q, kv: (kv <= q) & (q - kv < distance[0])))
    inputs = inputs._replace(value=jnp.asarray(rng.standard_normal(inputs.value.shape), inputs.value.dtype))
    tuning = resolve(MosaicGpuTuning(interpret=True), call)
    outputs = []
    for distance[0] in (40, 300):
        output, _ = mosaic_gpu.fwd(inputs, call, tuning)
        expected = dot_product_attention(
            *inputs[:3], CausalMask() & LocalMask(distance[0] - 1, 0), implementation="reference"
        )
        np.testing.assert_allclose(np.asarray(output, np.float32), np.asarray(expected, np.float32), atol=2e-2)
        outputs.append(np.asarray(output, np.float32))
    assert abs(outputs[0] - outputs[1]).max() > 0.1


def requested_shared_memory(inputs, call, tuning: MosaicGpuTuning) -> tuple[list[int], str | None]:
    """What Mosaic GPU requests for each kernel that asks for some, up to the first refused, and the refusal."""
    requested, tree_size = [], core._smem_tree_size

    def record(scratch):
        size = tree_size(scratch)
        if size > 0:
            requested.append(size)
        return size

    def run(inputs):
        output, lse = mosaic_gpu.fwd(inputs, call, tuning)
        return mosaic_gpu.bwd(inputs, call, tuning, Cotangent.of(output, lse, output))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_smem_tree_size", record)
        try:
            jax.jit(run).trace(inputs).lower(lowering_platforms=("cuda",))
        except ValueError as refusal:
            return requested, str(refusal)
    return requested, None


@pytest.mark.sample(2)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    "head_dims", [(32, 32), (64, 64), (128, 128), (192, 192), (256, 256), (192, 128), (64, 192)], ids=repr
)
def test_shared_memory_is_counted_as_mosaic_gpu_requests_it(head_dims, rng):
    for _ in range(4):
        (inputs, call), tuning = random_call(rng, *head_dims), random_tuning(rng, *head_dims)
        requested, refusal = requested_shared_memory(inputs, call, tuning)
        assert list(shared_memory_bytes(call, tuning).values())[: len(requested)] == requested
        excess = shared_memory_excess(call, tuning)
        if refusal is None:
            assert (len(requested), excess) == (2 if tuning.backward == "fused" else 3, None)
        else:
            assert "exceeds available shared memory" in refusal
            assert f"need {requested[-1]:,} bytes of shared memory, of which a Hopper GPU has 232,448" in excess


@pytest.mark.jax_0_11
def test_a_named_tuning_that_does_not_fit_is_refused_with_the_remedy():
    _, call = call_of(head_dim=256)
    tuning = MosaicGpuTuning(forward_tiles=MosaicForwardTuning(2, 256, 4))
    # Queries, keys and values, lse on its own kilobyte, and 20 barriers.
    assert 2 * 64 * 256 * 2 + 2 * 4 * 256 * 256 * 2 + 1024 + 20 * 8 == 1_115_296
    expected = (
        "forward_tiles of num_stages=4, block_kv=256, num_warpgroups=2 at head dim 256 need 1,115,296 bytes of shared "
        "memory, of which a Hopper GPU has 232,448; lower num_stages or block_kv or num_warpgroups"
    )
    with pytest.raises(ValueError, match=re.escape(f"can't serve this call: {expected}")):
        select_backend(call, tuning)
    # The interpreter has no such limit.
    assert select_backend(call, dataclasses.replace(tuning, interpret=True)).name == "mosaic_gpu"


@pytest.mark.jax_0_11
def test_two_bounds_of_one_side_have_no_room_beside_wide_heads_and_triton_serves_them(monkeypatch):
    """Such as Gemma 3's windows with images."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # Triton is installed
    one, both = Bounds(k_end=jnp.zeros(512, jnp.int32)), Bounds(*[jnp.zeros(512, jnp.int32)] * 2)
    for head_dim, bounds in ((192, both), (256, one)):
        _, call = call_of(head_dim=head_dim, bounds=bounds)
        assert select_backend(call).name == "mosaic_gpu"
    _, call = call_of(head_dim=256, bounds=both)
    reason = (
        r"has no room for k_start and k_end, since backward_tiles of num_stages=2, .* at head dim 256 need [\d,]+ "
        "bytes of shared memory, of which a Hopper GPU has 232,448$"
    )
    for named in ("mosaic_gpu", MosaicGpuTuning("split")):
        with pytest.raises(ValueError, match=f"can't serve this call: {reason}"):
            select_backend(call, named)
    selection = select_backend(call)
    assert selection.name == "triton"
    assert re.search(reason, dict(selection.passed_over)["mosaic_gpu"])


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [*((dim, dim) for dim in (16, 32, 64, 80, 128, 192, 256)), (192, 128), (16, 192), (256, 128)],
)
@pytest.mark.parametrize("given", [(), ("segment_ids",), ("positions",), ("segment_ids", "positions")], ids=repr)
def test_the_best_tunings_known_serve(head_dim, value_dim, given):
    numbers = jnp.zeros((2, 512), jnp.int32)
    tokens = {f"{side}_{name}": numbers for side in ("query", "key_value") for name in given}
    for length in (512, 32768):
        for mask in (None, CausalMask(), LocalMask(100, 0)):
            for cap in (None, 5.0):
                _, call = call_of(mask, head_dim=head_dim, value_dim=value_dim, logits_soft_cap=cap, **tokens)
                call = call._replace(q_len=length)
                for tuning in (None, MosaicGpuTuning("split")):
                    resolved = resolve(tuning, call)
                    assert None not in (resolved.forward_tiles, resolved.backward_tiles)
                    assert mosaic_gpu.unsupported_reason(call, resolved) is None


@pytest.mark.jax_0_11
@pytest.mark.parametrize("given", [(), ("segment_ids",), ("positions",), ("segment_ids", "positions")], ids=repr)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_all_tiles_of_the_tables_fit_into_shared_memory(cap, given):
    """Only a caller's own tiles are checked when a kernel is called."""
    numbers = jnp.zeros((2, 512), jnp.int32)
    tokens = {f"{side}_{name}": numbers for side in ("query", "key_value") for name in given}
    forwards = [*tunings.FORWARD.items(), *tunings.FEW_BLOCKS.items()]
    rows = [(key, MosaicGpuTuning(forward_tiles=tiles)) for key, tiles in forwards]
    for form, table in (("fused", tunings.FUSED), ("split", tunings.SPLIT)):
        rows += [(key, MosaicGpuTuning(form, backward_tiles=tiles)) for key, tiles in table.items()]
    for key, tuning in rows:
        head_dim, value_dim = (192, 128) if key.head_dim == 160 else (key.head_dim, key.head_dim)
        for mask in (FullMask(), CausalMask(), CausalMask() & LocalMask(key.length - 1, 0)):
            _, call = call_of(mask, head_dim=head_dim, value_dim=value_dim, logits_soft_cap=cap, **tokens)
            assert shared_memory_excess(call, tuning) is None, key


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("tuning", [None, MosaicGpuTuning(interpret=True), MosaicGpuTuning("split")], ids=repr)
def test_resolving_leaves_nothing_open(tuning, packed, head_dim, rng):
    """Also where the faster backward is fused, which Pallas's interpreter can't run: it takes the other's tiles."""
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (2, 512)))) if packed else None
    _, call = call_of(CausalMask(), head_dim=head_dim, query_segment_ids=ids, key_value_segment_ids=ids)
    resolved = resolve(tuning, call)
    assert None not in (resolved.backward, resolved.forward_tiles, resolved.backward_tiles)
    assert resolved == resolve(resolved, call)
    assert resolved.backward == "split" or not (tuning and (tuning.interpret or tuning.backward == "split"))


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize("has_documents", [False, True])
def test_positions_in_runs_are_those_of_each_token(has_documents, rng):
    # A sharded sequence: runs of 128 tokens in any order, which a kernel knows by their first positions.
    length, run = 512, 128
    arrays = [jnp.asarray(rng.standard_normal((1, length, 2, 64)), jnp.bfloat16) for _ in range(4)]
    nothing = dict.fromkeys(("key_value_segment_ids", "query_segment_ids", "scale", "logits_soft_cap", "sinks"))
    positions = [(rng.permutation(8)[:4, None] * run + np.arange(run)).reshape(1, -1) for _ in range(2)]
    if has_documents:
        for name in ("query_segment_ids", "key_value_segment_ids"):
            nothing[name] = jnp.asarray(np.sort(rng.integers(0, 3, (1, length))), jnp.int32)
    mask = CausalMask() & LocalMask(int(rng.integers(100, 600)), 0)
    inputs, call = make_call(
        *arrays[:3],
        mask,
        **nothing,
        query_positions=jnp.asarray(positions[0], jnp.int32),
        key_value_positions=jnp.asarray(positions[1], jnp.int32),
        return_lse=True,
    )

    def run_all(call):
        tuning = resolve(MosaicGpuTuning(interpret=True), call)
        output, lse = mosaic_gpu.fwd(inputs, call, tuning)
        return output, lse, *mosaic_gpu.bwd(inputs, call, tuning, Cotangent.of(output, lse, arrays[3]))

    call = call._replace(target=H200)
    for one, other in zip(run_all(call), run_all(call._replace(position_run=run)), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_heads_that_share_keys_have_no_persistent_backward(monkeypatch):
    tiles = MosaicBackwardTuning(persistent=True)
    monkeypatch.setattr(tunings, "FUSED", {TunedCall(64, "causal", 4096): tiles})
    array, shared = (jnp.ones((2, 1024, heads, 64), jnp.bfloat16) for heads in (4, 2))
    for keys, persistent in ((array, True), (shared, False)):
        _, call = make_call(array, keys, keys, CausalMask())
        resolved = resolve(MosaicGpuTuning("fused"), call._replace(target=H200))
        assert resolved.backward_tiles == dataclasses.replace(tiles, persistent=persistent)
