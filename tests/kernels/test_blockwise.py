"""What the blockwise backend promises beyond values: what it visits, and what it takes in memory and time."""

import functools
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import BlockwiseTuning, CausalMask, LocalMask, MaskFn, PrefixMask, dot_product_attention
from kernels.attention.core import take_heads
from tests.seeds import run_seed

TILES = BlockwiseTuning(32, 32)


def attend(query, key, value, mask, tuning=TILES, **keywords):
    return dot_product_attention(query, key, value, mask, implementation=tuning, **keywords)


def forward_backward(attend, query, key, value, d_output):
    output, vjp = jax.vjp(attend, query, key, value)
    return output, *vjp(d_output)


def random(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


@pytest.mark.parametrize("traced", [False, True], ids=["static_plan", "plan_on_the_device"])
def test_empty_tiles_are_never_read(traced, rng):
    """Not-a-numbers spread from any tile that is read: a masked weight of 0 times NaN is NaN."""
    window, length, shown = CausalMask() & LocalMask(31, 0), 256, slice(128, 160)
    query, key, value, d_output = (random(rng, 1, length, 2, 8) for _ in range(4))
    keywords = {"query_positions": jnp.arange(length), "key_value_positions": jnp.arange(length)} if traced else {}
    run = jax.jit(functools.partial(forward_backward, lambda q, k, v: attend(q, k, v, window, **keywords)))
    clean = run(query, key, value, d_output)

    # Queries 128..159 see the key tiles 96..159; keys 128..159 are seen by the query tiles 128..191.
    unseen_keys = (jnp.arange(length) < 96) | (jnp.arange(length) >= 160)
    unseeing_queries = (jnp.arange(length) < 128) | (jnp.arange(length) >= 192)
    poison = lambda x, where: jnp.where(where[None, :, None, None], jnp.nan, x)  # noqa: E731
    output, d_query, _, _ = run(query, poison(key, unseen_keys), poison(value, unseen_keys), d_output)
    np.testing.assert_array_equal(output[:, shown], clean[0][:, shown])
    np.testing.assert_array_equal(d_query[:, shown], clean[1][:, shown])
    _, _, d_key, d_value = run(poison(query, unseeing_queries), key, value, poison(d_output, unseeing_queries))
    np.testing.assert_array_equal(d_key[:, shown], clean[2][:, shown])
    np.testing.assert_array_equal(d_value[:, shown], clean[3][:, shown])


def test_documents_that_share_no_tile_never_meet(rng):
    query, key, value, d_output = (random(rng, 2, 256, 2, 8) for _ in range(4))
    segment_ids = jnp.asarray(np.repeat([[1, 2, 3, 4], [1, 1, 2, 2]], 64, axis=1))
    ids = {"query_segment_ids": segment_ids, "key_value_segment_ids": segment_ids}
    run = jax.jit(functools.partial(forward_backward, lambda q, k, v: attend(q, k, v, CausalMask(), **ids)))
    clean = run(query, key, value, d_output)
    poisoned = jnp.where((segment_ids == 2)[..., None, None], jnp.nan, value)
    for actual, expected in zip(run(query, key, poisoned, d_output), clean, strict=True):
        others = np.asarray(segment_ids) != 2
        np.testing.assert_array_equal(np.asarray(actual)[others], np.asarray(expected)[others])
        assert np.isnan(actual[0, 64:128]).any() or expected is clean[3]


def test_the_mask_is_evaluated_in_partial_tiles_alone(rng):
    """A mask whose function denies what its closed form calls FULL is believed about the latter."""

    def causal_near_the_diagonal(q_pos, kv_pos):
        return (kv_pos <= q_pos) & (q_pos - kv_pos < 32)

    query, key, value, d_output = (random(rng, 1, 128, 2, 8) for _ in range(4))
    mask = MaskFn(causal_near_the_diagonal, CausalMask().classify)
    actual = forward_backward(lambda q, k, v: attend(q, k, v, mask), query, key, value, d_output)
    expected = forward_backward(
        lambda q, k, v: dot_product_attention(q, k, v, CausalMask(), implementation="reference"),
        query,
        key,
        value,
        d_output,
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [CausalMask(), LocalMask(100, 0), CausalMask() | PrefixMask(100)], ids=repr)
@pytest.mark.parametrize("packed", [False, True])
def test_no_array_grows_with_the_square_of_the_length(mask, packed):
    """The largest array of the compiled forward and backward is an input's size, or a tile's; packed documents too.

    The tiles here are small: an array of one element a tile would have (8192 / 8)² elements.
    """
    length, tiles = 8192, BlockwiseTuning(8, 8)

    def run(query, key, value, d_output, ids):
        keywords = {"query_segment_ids": ids, "key_value_segment_ids": ids} if packed else {}
        return forward_backward(
            lambda q, k, v: attend(q, k, v, mask, tuning=tiles, **keywords), query, key, value, d_output
        )

    x, ids = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32), jax.ShapeDtypeStruct((1, length), jnp.int32)
    hlo = jax.jit(run).lower(x, x, x, x, ids).compile().as_text()
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", hlo)
    largest = max(int(np.prod([int(side) for side in shape.split(",")])) for shape in shapes)
    assert largest <= length * 2 * 16


@pytest.mark.parametrize("scale", [0.3, None])
def test_float64_is_computed_in_float64(scale, rng):
    with jax.enable_x64(True):
        query, key, value, d_output = (jnp.asarray(rng.standard_normal((1, 96, 2, 12))) for _ in range(4))
        actual, expected = (
            forward_backward(
                lambda q, k, v, name=name: dot_product_attention(
                    q, k, v, CausalMask(), scale=scale, implementation=name, return_lse=True
                )[0],
                query,
                key,
                value,
                d_output,
            )
            for name in ("blockwise", "reference")
        )
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-12)


OURS = "dot_product_attention(q, k, v, LocalMask(1023, 0))"
DENSE = "jax.nn.dot_product_attention(q, k, v, local_window_size=(1023, 0), implementation='xla')"


def measure_in_a_fresh_process(length, attention=OURS, *, num_calls=3):
    """Peak resident bytes, and the least seconds, of forward + backward: 4 heads of 64, window 1024, float32."""
    program = f"""
        import resource, time
        import jax, numpy as np
        from kernels import LocalMask, dot_product_attention
        rng = np.random.default_rng({run_seed()})
        arrays = [jax.numpy.asarray(rng.standard_normal((1, {length}, 4, 64), np.float32)) for _ in range(4)]
        @jax.jit
        def run(q, k, v, d_output):
            output, vjp = jax.vjp(lambda q, k, v: {attention}, q, k, v)
            return output, vjp(d_output)
        seconds = []
        for _ in range({num_calls}):
            begin = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds.append(time.perf_counter() - begin)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, min(seconds))
    """
    # As users run it: `conftest.py` leaves LLVM's optimisations out, and gives XLA more threads than there are cores.
    users = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=users,
        capture_output=True,
        text=True,
        check=True,
    )
    peak, seconds = result.stdout.split()
    return int(peak), float(seconds)


@pytest.mark.serial
def test_memory_at_131072_tokens():
    peak, _ = measure_in_a_fresh_process(131_072, num_calls=1)
    assert peak < 2e9


@pytest.mark.serial
def test_memory_and_speed_at_32768_tokens():
    """Ten times as fast as dense attention, whose time at 4,096 tokens is scaled by the square of the length."""
    peak, blockwise_s = measure_in_a_fresh_process(32_768)
    assert peak < 1e9
    _, dense_s = measure_in_a_fresh_process(4096, DENSE)
    assert dense_s * (32_768 / 4096) ** 2 > 10 * blockwise_s


def test_heads_are_taken_by_slices(rng):
    """In any order, repeated or not, forward and backward, as indexing does."""
    x = random(rng, 2, 3, 6, 4)
    for heads in ([0, 2, 4], [5, 3, 1], [1, 1, 2, 4, 4], [0, 3, 1, 4, 2, 5], [2], [0, 1, 2, 3, 4, 5]):
        found, vjp = jax.vjp(lambda x, heads=heads: take_heads(x, np.array(heads)), x)
        np.testing.assert_array_equal(found, x[:, :, np.array(heads)])
        cotangent = random(rng, *found.shape)
        np.testing.assert_allclose(
            vjp(cotangent)[0], jnp.zeros_like(x).at[:, :, np.array(heads)].add(cotangent), rtol=1e-6
        )
