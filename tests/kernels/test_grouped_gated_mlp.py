"""Gated MLPs of groups of rows, and the copies of rows that they are given, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Target
from kernels.experts import (
    GatedMatrices,
    choose_grouped_matmul,
    copy_rows,
    group_rows,
    grouped_gated_mlp,
    sum_copies,
)


def gated_tanh(gate, features):
    """No layer's activation: (1 − g²/8) · (f + f³/8), and its slopes."""
    of_gate, of_features = 1 - gate * gate / 8, features + features * features * features / 8
    return of_gate * of_features, -gate / 4 * of_features, of_gate * (1 + 3 * features * features / 8)


def assert_close(actual, expected, rtol, scale=None):
    """To `rtol` of each number and of the scale: of the largest number if there is no other."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    scale = abs(expected).max() if scale is None else scale
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale)


def assert_is_a_loop_over_groups(rng, choice, num_rows, width, hidden_width, num_groups, *, dtype, biased):
    groups = rng.integers(0, num_groups, num_rows)
    groups[groups == rng.integers(num_groups)] = 0  # a group without rows
    shapes = [(width, hidden_width)] * 2 + [(hidden_width, width)] + [(hidden_width,)] * (2 if biased else 0)
    parameters = [
        jnp.asarray(rng.standard_normal((num_groups, *shape)) / (shape[0] ** 0.5 if len(shape) > 1 else 1), dtype)
        for shape in shapes
    ]
    rows, gradients = (jnp.asarray(rng.standard_normal((num_rows, width)), dtype) for _ in range(2))
    weights = jnp.asarray(rng.standard_normal(num_rows), jnp.float32)

    @jax.jit
    def of_kernels(rows, weights, parameters, gradients):
        order = group_rows(jnp.asarray(groups), num_groups, choice.alignment)

        def mlp(rows, weights, parameters):
            sorted_weights = weights.at[order.sources].get(mode="fill", fill_value=0)
            copies = copy_rows(rows, order, 1, choice)
            matrices = GatedMatrices(*parameters)
            outputs = grouped_gated_mlp(copies, sorted_weights, matrices, order, gated_tanh, choice, "projection")
            return sum_copies(outputs, order, 1, choice)

        outputs, vjp = jax.vjp(mlp, rows, weights, parameters)
        return outputs, *vjp(gradients)

    outputs, of_rows, of_weights, of_parameters = of_kernels(rows, weights, parameters, gradients)
    rows, weights, gradients, *parameters = (np.asarray(x, np.float64) for x in (rows, weights, gradients, *parameters))
    expected, expected_of_rows, expected_of_weights = np.zeros(rows.shape), np.zeros(rows.shape), np.zeros(num_rows)
    expected_of_parameters, scale_of_weights = [np.zeros(each.shape) for each in parameters], 0.0
    for group in range(num_groups):
        own = groups == group
        up, gate, down, *biases = (each[group] for each in parameters)
        features, gates = (rows[own] @ m + b for m, b in zip((up, gate), biases or (0, 0), strict=True))
        activated, in_gates, in_features = gated_tanh(gates, features)
        hidden, of_hidden = activated * weights[own, None], gradients[own] @ down.T
        expected[own] = hidden @ down
        expected_of_weights[own] = (of_hidden * activated).sum(1)
        scale_of_weights = max([scale_of_weights, *np.linalg.norm(of_hidden * activated, axis=1)])
        of_features, of_gates = (of_hidden * weights[own, None] * slope for slope in (in_features, in_gates))
        expected_of_rows[own] = of_features @ up.T + of_gates @ gate.T
        own_gradients = [rows[own].T @ of_features, rows[own].T @ of_gates, hidden.T @ gradients[own]]
        own_gradients += [of_features.sum(0), of_gates.sum(0)] if biased else []
        for each, found in zip(expected_of_parameters, own_gradients, strict=True):
            each[group] = found
    rtol = 2**-6 if dtype == "bfloat16" else 2**-8  # features and gates are rounded between the matmuls
    assert_close(outputs, expected, rtol)
    assert_close(of_rows, expected_of_rows, rtol)
    # A sum whose terms have both signs, of which there may be one alone.
    assert_close(of_weights, expected_of_weights, rtol, scale=scale_of_weights)
    for found, each in zip(of_parameters, expected_of_parameters, strict=True):
        assert_close(found, each, rtol)


@pytest.mark.sample(2)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("num_rows", "width", "hidden_width", "num_groups", "biased"),
    # Half a tile of features, and one and a half. Blocks of rows: one, which has no pair; two of two groups; two of one
    # group, which load its matrices once for both; and three.
    [
        (125, 64, 64, 1, False),
        (90, 128, 192, 2, True),
        (130, 64, 64, 2, False),  # and a block after the last group, mostly
        (200, 64, 64, 1, False),
        (300, 64, 64, 1, True),
    ],
)
def test_in_the_interpreter(rng, num_rows, width, hidden_width, num_groups, biased):
    choice = choose_grouped_matmul("bfloat16", (width, hidden_width), Target.of(), "mosaic_gpu", interpret=True)
    assert_is_a_loop_over_groups(
        rng, choice, num_rows, width, hidden_width, num_groups, dtype="bfloat16", biased=biased
    )


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_rows", "width", "hidden_width", "num_groups", "biased"),
    [
        (1, 64, 64, 1, False),
        (640, 64, 192, 1, True),
        (3000, 512, 2880, 8, True),
        (5000, 2048, 768, 32, False),
        (2000, 320, 448, 64, True),
    ],
)
def test_on_a_gpu(rng, num_rows, width, hidden_width, num_groups, biased, dtype):
    choice = choose_grouped_matmul(dtype, (width, hidden_width), Target.of(), "mosaic_gpu")
    assert_is_a_loop_over_groups(rng, choice, num_rows, width, hidden_width, num_groups, dtype=dtype, biased=biased)


def assert_copies_are_the_rows(rng, choice, num_rows, width, num_copies, num_groups):
    """In all places that a grouped matmul reads."""
    groups = rng.integers(0, num_groups, num_rows * num_copies)
    order = group_rows(jnp.asarray(groups), num_groups, choice.alignment)
    rows = jnp.asarray(rng.standard_normal((num_rows, width)), jnp.bfloat16)
    copies = np.asarray(copy_rows(rows, order, num_copies, choice), np.float64)
    rows, _, sources, counts, sizes = (np.asarray(each, np.float64) for each in (rows, *order))
    assert len(copies) == len(sources)
    for start, count in zip(np.cumsum(sizes) - sizes, counts, strict=True):
        start, end = int(start), int(start + count)
        assert (copies[start:end] == rows[sources[start:end].astype(int) // num_copies]).all()
        assert not copies[end : start + -(-(end - start) // 64) * 64].any()


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("num_rows", "width", "num_copies", "num_groups"), [(24, 128, 3, 5), (7, 256, 1, 2), (16, 320, 2, 9)]
)
def test_copies_in_the_interpreter(rng, num_rows, width, num_copies, num_groups):
    choice = choose_grouped_matmul("bfloat16", (width,), Target.of(), "mosaic_gpu", interpret=True)
    assert_copies_are_the_rows(rng, choice, num_rows, width, num_copies, num_groups)


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("num_rows", "width", "num_copies", "num_groups"),
    [(1, 64, 1, 1), (4096, 2048, 8, 128), (1001, 2880, 4, 32), (333, 7168, 2, 300)],
)
def test_copies_on_a_gpu(rng, num_rows, width, num_copies, num_groups):
    choice = choose_grouped_matmul("bfloat16", (width,), Target.of(), "mosaic_gpu")
    assert_copies_are_the_rows(rng, choice, num_rows, width, num_copies, num_groups)
