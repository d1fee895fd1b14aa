"""The reference backend, which specifies the others, against attention spelled out pair by pair in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import FullMask, dot_product_attention
from tests.kernels.contract_cases import CASES
from tests.kernels.spelled_out import spelled_out


def assert_values(case, rng, dtype, *, rtol, atol):
    """Output and lse of the reference in a dtype, against float64 of the same numbers."""
    (query, key, value, sinks), keywords, _ = case.inputs(rng, dtype)
    if dtype == np.float32 and case.uneven_logits:
        # Of few bits, so that products and their sums are exact: else float32 rounds logits of 24 by more than bounds
        # that fit logits of 5.
        query, key = (x.astype(jnp.bfloat16).astype(dtype) for x in (query, key))
    attend = functools.partial(dot_product_attention, mask=case.mask, implementation="reference", return_lse=True)
    actual = jax.jit(functools.partial(attend, **keywords))(query, key, value, sinks=sinks)
    mask = FullMask() if case.mask is None else case.mask
    for a, e in zip(actual, spelled_out(query, key, value, sinks, mask, keywords), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_in_float32(case, rng):
    assert_values(case, rng, np.float32, rtol=2e-5, atol=2e-6)


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_in_float64(case, rng):
    with jax.enable_x64(True):
        assert_values(case, rng, np.float64, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("empty_rows", "soft_cap", "everything")], ids=lambda case: case.name
)
def test_gradients_against_finite_differences(case, rng):
    with jax.enable_x64(True):
        (query, key, value, sinks), keywords, cotangents = case.inputs(rng, np.float64)
        sinks = np.zeros(case.num_heads) if sinks is None else np.asarray(sinks, np.float64)

        @jax.jit
        def loss(*arrays):
            output, lse = dot_product_attention(
                *arrays[:3], case.mask, sinks=arrays[3], implementation="reference", return_lse=True, **keywords
            )
            return (output * cotangents[0]).sum() + jnp.where(jnp.isfinite(lse), lse * cotangents[1], 0).sum()

        arrays = [np.asarray(x, np.float64) for x in (query, key, value, sinks)]
        gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)
        for index, gradient in enumerate(gradients):
            direction = rng.standard_normal(arrays[index].shape)
            step = 1e-5
            up, down = (
                loss(*arrays[:index], arrays[index] + moved * direction, *arrays[index + 1 :])
                for moved in (step, -step)
            )
            slope = (up - down) / (2 * step)
            np.testing.assert_allclose((np.asarray(gradient) * direction).sum(), slope, rtol=1e-6, atol=1e-8)
