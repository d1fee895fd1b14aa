"""Attention inside `jax.shard_map`, which by default checks over which mesh axes each array differs.

A mesh of one device has axes to differ over, too; tests/layers/test_on_eight_devices.py has the numbers of several.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kernels import (
    BlockwiseTuning,
    CausalMask,
    LocalMask,
    SlabCache,
    SplashTuning,
    Target,
    TritonTuning,
    UnifiedCache,
    decode_attention,
    dot_product_attention,
    select_backend,
)
from kernels.call import make_call
from kernels.decode.call import make_decode_call
from tests.kernels.contract_cases import CASES

HEADS = P("data", None, "tensor")


def sharded(function, in_specs, out_specs):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.parametrize("name", ["grouped_query", "everything"])
@pytest.mark.parametrize("implementation", ["reference", BlockwiseTuning(32, 16)], ids=["reference", "blockwise"])
def test_values_and_gradients_under_shard_map(implementation, name, rng):
    (case,) = (case for case in CASES if case.name == name)
    arrays, keywords, cotangents = case.inputs(rng)
    given = [x for x in arrays if x is not None]
    tokens = {name: x for name, x in keywords.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in keywords.items() if name not in tokens}

    def attend(inputs, tokens):
        sinks = inputs[3] if case.sinks else None
        return dot_product_attention(
            *inputs[:3], case.mask, sinks=sinks, implementation=implementation, return_lse=True, **options, **tokens
        )

    # A key/value pair that all of `tensor` shares has a gradient that is summed over it; shared tokens have none.
    specs = [HEADS, P("data"), P("data"), P("tensor")][: len(given)]
    split = sharded(
        attend, (specs, {name: P("data") if x.ndim == 2 else P() for name, x in tokens.items()}), (HEADS,) * 2
    )

    @jax.jit
    def both(inputs):
        results = []
        for function in (attend, split):
            outputs, vjp = jax.vjp(lambda inputs, function=function: function(inputs, tokens), inputs)
            lse = jnp.where(jnp.isfinite(outputs[1]), cotangents[1], 0)
            results.append((outputs, vjp((cotangents[0], lse))))
        return results

    expected, actual = both(given)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-5), actual, expected)


CACHES = {
    "slab": (lambda x: SlabCache.empty(2, 16, 2, 8, dtype=jnp.float32, block_size=8).write(x, x), P("data")),
    "unified": (
        lambda x: UnifiedCache.empty(2, 32, 2, 8, dtype=jnp.float32, block_size=8).write(x, x),
        P(),
    ),
}


@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("form", CACHES)
def test_decoding_under_shard_map(form, implementation, rng):
    make_cache, spec = CACHES[form]
    cache = make_cache(jnp.asarray(rng.standard_normal((2, 12, 2, 8)), jnp.float32))
    query = jnp.asarray(rng.standard_normal((2, 1, 4, 8)), jnp.float32)

    def decode(query, cache):
        return decode_attention(query, cache, CausalMask() & LocalMask(9, 0), implementation=implementation)

    split = sharded(decode, (P("data"), spec), P("data"))
    np.testing.assert_allclose(jax.jit(split)(query, cache), jax.jit(decode)(query, cache), atol=1e-6)


def test_kernels_that_cannot_say_what_varies_name_the_remedy():
    x = jnp.ones((1, 128, 2, 128))
    tuning = SplashTuning.square(128, interpret=True)
    reason = r"don't say over which mesh axes their outputs differ.*pass check_vma=False to jax.shard_map"

    def attend(x):
        return dot_product_attention(x, x, x, implementation=tuning)

    with pytest.raises(ValueError, match=f"can't serve this call: .*{reason}"):
        jax.eval_shape(sharded(attend, HEADS, HEADS), x)

    def look(x):
        """What would be chosen on other hardware."""
        nothing = dict.fromkeys(("scale", "logits_soft_cap", "sinks"))
        tokens = [f"{side}_{what}" for side in ("query", "key_value") for what in ("segment_ids", "positions")]
        call = make_call(x, x, x, None, return_lse=False, **nothing, **dict.fromkeys(tokens))[1]
        selection = select_backend(call._replace(target=Target("tpu", "TPU v5")))
        assert (selection.name, selection.passed_over[0][0]) == ("blockwise", "splash")
        cache = SlabCache.empty(1, 1 << 14, 2, 128, dtype=x.dtype)
        call = make_decode_call(x[:, :1], cache, None, sequences=None, query_positions=None, **nothing)[1]
        call = call._replace(target=Target("gpu", "NVIDIA H200", 9.0, 132))
        with pytest.raises(ValueError, match=f"implementation='triton' can't serve this call: .*{reason}"):
            select_backend(call, "triton")
        return x

    jax.eval_shape(sharded(look, HEADS, HEADS), x)


def test_a_fused_projection_names_the_remedy_too():
    pytest.importorskip("triton", reason="Triton is for x86 Linux")
    from kernels.attention.fused_qkv import attend_fused_qkv

    attend = functools.partial(attend_fused_qkv, num_kv_heads=1, tuning=TritonTuning(interpret=True))
    with pytest.raises(ValueError, match=r"triton backend can't serve this call: .*pass check_vma=False"):
        jax.eval_shape(sharded(attend, P("data"), P("data")), jnp.ones((1, 64, 3, 64), jnp.float16))
