"""Products of bfloat16 and float32 by parts, against NumPy's in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from layers.products_by_parts import multiply_by_parts


def relative_error(actual, expected):
    """The root mean square of the error over that of the values."""
    return np.sqrt(np.mean((np.asarray(actual, np.float64) - expected) ** 2) / np.mean(expected**2))


def test_value_and_the_matrix_gradient_are_as_exact_as_float32(rng):
    rows = jnp.asarray(rng.standard_normal((300, 500)), jnp.bfloat16)
    # From 2⁻²⁰ to 2²⁰, so that parts are of many sizes.
    matrix, cotangent = (
        jnp.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape[1]), jnp.float32)
        for shape in ((500, 24), (300, 24))
    )
    value, vjp = jax.jit(lambda *operands: jax.vjp(multiply_by_parts, *operands))(rows, matrix)
    of_rows, of_matrix = vjp(cotangent)
    assert (value.dtype, of_rows.dtype, of_matrix.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    exact_rows, exact_matrix, exact_cotangent = (np.asarray(x, np.float64) for x in (rows, matrix, cotangent))
    exact = exact_rows @ exact_matrix, exact_rows.T @ exact_cotangent, exact_cotangent @ exact_matrix.T
    # Each column by itself: they differ by 2⁴⁰.
    for found, expected in ((value, exact[0]), (of_matrix, exact[1])):
        float32_sum_error = 2.0**-24 * np.sqrt(500)
        for column in range(24):
            assert relative_error(found[:, column], expected[:, column]) < float32_sum_error
    # Rounding to bfloat16 alone has an error of 2⁻⁹ at most.
    assert relative_error(of_rows, exact[2]) < 2.0**-9


def test_the_sum_of_three_parts_is_the_number_itself(rng):
    # One feature, and rows of 1: no sum rounds.
    matrix = jnp.asarray(rng.standard_normal((1, 4000)) * 2.0 ** rng.integers(-90, 126, 4000), jnp.float32)
    value = jax.jit(multiply_by_parts)(jnp.ones((1, 1), jnp.bfloat16), matrix)
    np.testing.assert_array_equal(value, matrix)
