"""RMSNorm and MLP against NumPy."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers import MLP, RMSNorm
from layers.activations import activate
from layers.config import MLPKind

gelu, swiglu = functools.partial(activate, "gelu"), functools.partial(activate, "swiglu")


def assert_is_rounded_once(actual, exact):
    """Float32's error can move a number over the middle between two of bfloat16's: either of them is right then."""
    exact = np.asarray(exact, np.float64)
    error = 2**-18 * np.abs(exact)
    least, most = ((exact + side * error).astype(jnp.bfloat16) for side in (-1, 1))
    actual = np.asarray(actual)
    assert actual.dtype == jnp.bfloat16
    assert ((least <= actual) & (actual <= most)).all()
    assert (least == most).mean() > 0.9


def test_norm_is_computed_in_float32(rng):
    # The mean square of these overflows bfloat16's 8 bits of precision, and float16's range.
    inputs = jnp.asarray(rng.standard_normal((3, 512)) * 1e3, jnp.bfloat16)
    norm = RMSNorm(512)
    norm.scale[...] = jnp.asarray(rng.standard_normal(512), jnp.float32)
    values = np.asarray(inputs, np.float64)
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...])
    assert_is_rounded_once(norm(inputs), expected)


def test_norm_of_zeros_is_zero_with_a_finite_gradient():
    norm = RMSNorm(8)
    value, gradient = jax.value_and_grad(lambda x: norm(x).sum())(jnp.zeros((2, 8)))
    assert value == 0
    assert jnp.isfinite(gradient).all()


def gelu_oracle(x):
    """Value and slope in float64."""
    z, dz = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return x / 2 * (1 + np.tanh(z)), (1 + np.tanh(z)) / 2 + x / 2 * (1 - np.tanh(z) ** 2) * dz


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2**-8)])
def test_gelu_and_its_slope_match_float64_from_tail_to_tail(rng, dtype, tolerance):
    x = np.concatenate([3 * rng.standard_normal(500), [0, -1e4, 1e4, -40, 40]])
    x = jnp.asarray(x, dtype)
    value, slope = gelu_oracle(np.asarray(x, np.float64))
    actual, vjp = jax.vjp(gelu, x)
    (gradient,) = vjp(jnp.ones_like(x))
    assert actual.dtype == gradient.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(actual, np.float64), value, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), slope, rtol=tolerance, atol=tolerance)


def test_swiglu_and_its_gradients_match_float64(rng):
    gate, inputs = rng.standard_normal((2, 300)).astype(np.float32) * 4
    gate[:2] = -1e4, 1e4
    sigmoid = 1 / (1 + np.exp(-np.maximum(gate.astype(np.float64), -700)))
    value, vjp = jax.vjp(swiglu, inputs, gate)
    d_inputs, d_gate = vjp(jnp.ones_like(value))
    np.testing.assert_allclose(value, gate * sigmoid * inputs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_inputs, gate * sigmoid, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_gate, inputs * sigmoid * (1 + gate * (1 - sigmoid)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", get_args(MLPKind))
def test_rows_are_weighted_before_they_are_rounded(rng, float64, kind):
    inputs, cotangent = rng.standard_normal((2, 5, 40))
    gate = () if kind == "gelu" else (rng.standard_normal((5, 40)),)
    weights = rng.random(5)
    value, vjp = jax.vjp(functools.partial(activate, kind), inputs, *(gate or (None,)), weights)
    plain, plain_vjp = jax.vjp(functools.partial(activate, kind), inputs, *gate)
    np.testing.assert_allclose(value, plain * weights[:, None], rtol=1e-14)
    *gradients, d_weights = vjp(jnp.asarray(cotangent))
    np.testing.assert_allclose(d_weights, (cotangent * np.asarray(plain)).sum(1), rtol=1e-13, atol=1e-13)
    for actual, expected in zip(gradients, plain_vjp(jnp.asarray(cotangent * weights[:, None])), strict=False):
        np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=1e-13)
    narrow = activate(kind, *(jnp.asarray(x, jnp.bfloat16) for x in (inputs, *gate)), weights=jnp.asarray(weights))
    exact = activate(
        kind, *(jnp.asarray(x, jnp.bfloat16).astype(float) for x in (inputs, *gate)), weights=jnp.asarray(weights)
    )
    assert_is_rounded_once(narrow, exact)


def test_an_activation_takes_a_gate_just_where_its_kind_has_one():
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match="kind='swiglu' takes a gate, got none"):
        activate("swiglu", x)
    with pytest.raises(ValueError, match="kind='gelu' takes no gate, got one"):
        activate("gelu", x, x)


@pytest.mark.parametrize(("activation", "num_inputs"), [(gelu, 1), (swiglu, 2)])
def test_the_backward_pass_keeps_the_inputs_alone(activation, num_inputs):
    inputs = [jnp.ones((4, 8), jnp.bfloat16)] * num_inputs
    _, vjp = jax.vjp(activation, *inputs)
    kept = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(vjp) if leaf.size > 1]
    assert kept == [((4, 8), jnp.bfloat16)] * num_inputs


def test_mlp_computes_in_the_compute_dtype_and_stores_in_the_parameter_dtype():
    mlp = MLP(8, 24, compute_dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0))
    assert mlp(jnp.ones((1, 2, 8), jnp.float32)).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(mlp))} == {jnp.dtype("float32")}


def test_mlp_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="kind='relu' is not one of gelu, swiglu"):
        MLP(8, 24, kind="relu", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("limit", [-7.0, 7.0])
def test_at_its_limits_clamped_swiglu_has_the_slope_of_below_them(limit):
    """As PyTorch's clamp has it. Both limits are numbers of bfloat16, so that features do lie there."""

    def slopes(gate, features):
        return jax.grad(lambda *inputs: activate("clamped_swiglu", *inputs).sum(), (0, 1))(features, gate)

    features, gate = jnp.asarray([limit, 0.5]), jnp.asarray([1.5, 7.0])
    within = slopes(jnp.asarray([1.5, 6.9999]), jnp.asarray([limit * 0.9999, 0.5]))
    for at_limit, below in zip(slopes(gate, features), within, strict=True):
        np.testing.assert_allclose(at_limit, below, rtol=1e-3)
    assert slopes(gate, features * 1.01)[0][0] == 0
    assert jnp.isnan(slopes(jnp.asarray([1.5, jnp.nan]), jnp.asarray([jnp.nan, 0.5]))[1]).all(), "NaN isn't hidden"
