"""The attention contract, as each backend's tests hold a case to it: values and gradients, against the reference."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Bounds, SplashTuning, TritonTiles, TritonTuning, dot_product_attention
from tests.kernels.spelled_out import allowed_keys, spelled_out

SPLASH = SplashTuning.square(128, interpret=True)
INTERPRETED_TRITON = TritonTuning(
    forward=TritonTiles(32, 16), key_value=TritonTiles(16, 32), query=TritonTiles(32, 32), interpret=True
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton isn't installed: it is for Linux alone"
)
by_name = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "name", x))


def value_and_gradients(attend, arrays, cotangents, *, with_lse):
    """Output, lse (or None) and the gradients of query, key, value and sinks (if there are any)."""
    given = [x for x in arrays if x is not None]
    result, vjp = jax.vjp(lambda *given: attend(*given, *[None] * (len(arrays) - len(given))), *given)
    output, lse = result if with_lse else (result, None)
    d_output = cotangents[0].astype(output.dtype)
    # A row that attends to nothing has lse −inf, whose cotangent means nothing.
    d_lse = None if lse is None else jnp.where(jnp.isfinite(lse), cotangents[1], 0).astype(lse.dtype)
    return output, lse, vjp((d_output, d_lse) if with_lse else d_output)


def compiled_value_and_gradients(attend, arrays, keywords, cotangents, *, with_lse):
    attend = functools.partial(attend, keywords=keywords)
    return jax.jit(functools.partial(value_and_gradients, attend, with_lse=with_lse))(arrays, cotangents)


@functools.cache
def compiled_reference(case, with_lse):
    """A case's reference, compiled once for all the backends that are held to it: with the keywords traced, too."""

    @jax.jit
    def run(arrays, traced_keywords, cotangents):
        keywords = {"scale": case.scale, "logits_soft_cap": case.logits_soft_cap, **traced_keywords}
        attend = functools.partial(through_implementation(case, "reference", with_lse=with_lse), keywords=keywords)
        return value_and_gradients(attend, arrays, cotangents, with_lse=with_lse)

    return run


def assert_close(actual, expected, dtype):
    """Within a few roundings of the largest element, and equal where infinite."""
    epsilon = float(jnp.finfo(dtype).eps)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e))
        finite = np.isfinite(e)
        np.testing.assert_array_equal(a[~finite], e[~finite])
        largest = np.abs(e[finite]).max(initial=0)
        num_roundings = 64 if epsilon < 1e-4 else 4
        np.testing.assert_allclose(a[finite], e[finite], rtol=0, atol=num_roundings * epsilon * (1 + largest))


def run_case(case, rng, attend, *, dtype=jnp.float32, with_lse=True):
    arrays, keywords, cotangents = case.inputs(rng, dtype)
    actual = compiled_value_and_gradients(attend, arrays, keywords, cotangents, with_lse=with_lse)
    exact = [None if x is None else x.astype(jnp.float32) for x in arrays]
    traced_keywords = {name: x for name, x in keywords.items() if isinstance(x, jax.Array | Bounds)}
    expected = compiled_reference(case, with_lse)(exact, traced_keywords, cotangents)
    assert actual[0].dtype == dtype
    assert_close(actual, expected, dtype)


CLEAN, VALUE_IS_SPOILED = 0, 5  # elements of the batch


def run_spoiled_case(case, rng, attend, *, dtype=jnp.float32, with_lse=True, exact=False, empty_rows_leak=False):
    """NaN comes out where the definition has it and nowhere else; but kernels multiply whole tiles by weights of 0, so
    that a value's NaN may reach more of its element of the batch, and so may any NaN in the backward pass.

    Args:
      exact: whether no output but the definition's is NaN.
      empty_rows_leak: whether a value's NaN may reach queries that may attend to nothing, too.
    """
    arrays, keywords, cotangents = case.inputs(rng, dtype)
    output, lse, gradients = compiled_value_and_gradients(attend, arrays, keywords, cotangents, with_lse=with_lse)
    expected_output, expected_lse = spelled_out(*arrays, case.mask, keywords)
    assert np.isnan(expected_lse).any()
    if case.segments is None:
        assert not np.isfinite(expected_output[VALUE_IS_SPOILED]).all(), "no query sees the value"
    if with_lse:
        assert_close(lse, expected_lse, dtype)
    leaks = np.arange(case.batch) == VALUE_IS_SPOILED
    is_empty = expected_lse == -np.inf
    output = np.asarray(output, np.float64)
    if empty_rows_leak:
        is_empty &= ~leaks[:, None, None]
    assert (output[is_empty] == 0).all()
    not_finite = ~np.isfinite(expected_output)
    assert not np.isfinite(output[not_finite]).any(), "a NaN or an infinity is hidden"
    compared = ~not_finite if exact else ~not_finite & ~leaks[:, None, None, None]
    assert_close(output[compared], expected_output[compared], dtype)

    d_query, d_key, d_value, *d_sinks = (np.asarray(x, np.float64) for x in gradients)
    assert not np.isfinite(d_query[not_finite.all(-1)]).any()
    for b, t, n in np.argwhere(np.isnan(expected_lse)):
        allowed = allowed_keys(b, t, n, case.q_len, case.kv_len, case.mask, keywords)
        for gradient in (d_key, d_value):
            assert not np.isfinite(gradient[b, allowed, n // (case.num_heads // case.num_kv_heads)]).any()
    assert not np.isfinite(d_sinks).any()
    if not case.sinks:
        assert all(np.isfinite(x[CLEAN]).all() for x in (d_query, d_key, d_value))


def through_implementation(case, implementation, *, with_lse=True):
    def attend(query, key, value, sinks, *, keywords):
        return dot_product_attention(
            query, key, value, case.mask, sinks=sinks, implementation=implementation, return_lse=with_lse, **keywords
        )

    return attend


def vmapped(attend):
    """Attends to one element of the batch at a time, under `jax.vmap`."""

    def attend_under_vmap(query, key, value, sinks, *, keywords):
        def one(*arrays):
            return tuple(x[0] for x in attend(*(x[None] for x in arrays), sinks, keywords=keywords))

        return jax.vmap(one)(query, key, value)

    return attend_under_vmap
