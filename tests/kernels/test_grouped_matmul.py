"""Grouped matmuls against a loop over the groups in NumPy, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Target
from kernels.experts import choose_grouped_matmul, group_rows, grouped_matmul, multiply

H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def draw_groups(rng, num_rows, num_groups):
    """Groups of rows: even, skewed, all alike, or of which some have no rows."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(0, num_groups, num_rows)
    if kind == 1:
        return np.minimum(rng.geometric(0.5, num_rows) - 1, num_groups - 1)
    if kind == 2:
        return np.full(num_rows, rng.integers(num_groups))
    return rng.choice(rng.permutation(num_groups)[: max(1, num_groups // 2)], num_rows)


def assert_is_a_loop_over_groups(rng, choice, num_rows, features, num_groups, *, dtype, num_products=1, rtol):
    """Values and all gradients, of operands whose rows are in any order."""
    depth, columns = features
    groups = draw_groups(rng, num_rows, num_groups)
    rows = jnp.asarray(rng.standard_normal((num_rows, depth)), dtype)
    matrices = [
        jnp.asarray(rng.standard_normal((num_groups, depth, columns)) / depth**0.5, dtype) for _ in range(num_products)
    ]
    gradients = [jnp.asarray(rng.standard_normal((num_rows, columns)), dtype) for _ in range(num_products)]

    @jax.jit
    def multiply(rows, matrices, gradients):
        order = group_rows(jnp.asarray(groups), num_groups, choice.alignment)
        placed = rows[jnp.minimum(order.sources, num_rows - 1)]  # what pads a group is some row
        of_placed = [each.at[order.sources].get(mode="fill", fill_value=0) for each in gradients]
        products, vjp = jax.vjp(lambda rows, matrices: grouped_matmul(rows, matrices, order, choice), placed, matrices)
        of_rows, of_matrices = vjp(tuple(of_placed))
        after = jnp.arange(placed.shape[0]) >= order.sizes.sum()
        of_nothing = [jnp.where(after[:, None], each, 0) for each in (*products, of_rows)]
        return [each[order.places] for each in products], of_rows[order.places], of_matrices, of_nothing

    *actual, of_nothing = multiply(rows, matrices, gradients)
    rows, *others = (np.asarray(x, np.float64) for x in (rows, *matrices, *gradients))
    matrices, gradients = others[:num_products], others[num_products:]
    products = [np.zeros((num_rows, columns)) for _ in matrices]
    of_rows, of_matrices = np.zeros(rows.shape), [np.zeros(each.shape) for each in matrices]
    for group in range(num_groups):
        own = groups == group
        for i in range(num_products):
            products[i][own] = rows[own] @ matrices[i][group]
            of_rows[own] += gradients[i][own] @ matrices[i][group].T
            of_matrices[i][group] = rows[own].T @ gradients[i][own]
    for found, expected in zip(jax.tree.leaves(actual), [*products, of_rows, *of_matrices], strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rtol, atol=rtol * abs(expected).max())
    assert not any(np.asarray(each, np.float64).any() for each in of_nothing)


@pytest.mark.parametrize("alignment", [1, 2, 128])
@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (1, 5), (40, 3), (7, 100), (300, 4)])
def test_each_row_has_a_place_of_its_own_among_its_groups(rng, num_rows, num_groups, alignment):
    groups = draw_groups(rng, num_rows, num_groups)
    order = jax.jit(group_rows, static_argnums=(1, 2))(jnp.asarray(groups), num_groups, alignment)
    places, sources, counts, sizes = map(np.asarray, order)
    assert counts.tolist() == np.bincount(groups, minlength=num_groups).tolist()
    assert sizes.tolist() == [-(-count // alignment) * alignment for count in counts]
    assert len(sources) % alignment == 0
    assert len(sources) >= sizes.sum()
    starts = np.cumsum(sizes) - sizes
    for group in range(num_groups):
        # In their own order, from the group's beginning.
        assert places[groups == group].tolist() == list(range(starts[group], starts[group] + counts[group]))
    assert sources[places].tolist() == list(range(num_rows))
    assert set(np.delete(sources, places).tolist()) <= {num_rows}


@pytest.mark.parametrize("num_products", [1, 2])
def test_of_xla(rng, num_products):
    with jax.enable_x64(True):
        choice = choose_grouped_matmul("float64", (24, 10), Target.of(jax.devices("cpu")[0]))
        assert (choice.name, choice.alignment) == ("xla", 1)
        num_rows, num_groups = int(rng.integers(1, 90)), int(rng.integers(1, 9))
        assert_is_a_loop_over_groups(
            rng, choice, num_rows, (24, 10), num_groups, dtype="float64", num_products=num_products, rtol=1e-12
        )


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("num_rows", "features", "num_groups", "num_products"),
    # Tiles of 64, 192 and 256 columns; rows for the first consumer alone; more columns than a panel's.
    [(300, (192, 64), 3, 1), (90, (128, 256), 5, 2), (130, (64, 576), 2, 1)],
)
def test_of_the_kernel_in_the_interpreter(rng, num_rows, features, num_groups, num_products):
    choice = choose_grouped_matmul("bfloat16", features, Target.of(), "mosaic_gpu", interpret=True)
    assert_is_a_loop_over_groups(
        rng, choice, num_rows, features, num_groups, dtype="bfloat16", num_products=num_products, rtol=2**-8
    )


@pytest.mark.jax_0_11
def test_half_a_tile_that_only_pads_is_skipped(rng):
    """Of 10, 130 and 65 rows in tiles of 128 the second halves of the first and the second group's last one pad."""
    choice = choose_grouped_matmul("bfloat16", (64, 64), Target.of(), "mosaic_gpu", interpret=True)
    groups = group_rows(jnp.repeat(jnp.arange(3), jnp.array([10, 130, 65])), 3, choice.alignment)
    is_padding = np.asarray(groups.sources) == 205
    rows = rng.standard_normal((len(is_padding), 64))
    rows[is_padding] = np.inf
    matrices = jnp.asarray(rng.standard_normal((3, 64, 64)), jnp.bfloat16)
    (products,) = grouped_matmul(jnp.asarray(rows, jnp.bfloat16), [matrices], groups, choice)
    products = np.asarray(products, np.float32)
    assert np.isfinite(products[~is_padding]).all()
    halves = products.reshape(-1, 64, 64)
    only_padding = is_padding.reshape(-1, 64).all(1)
    assert only_padding.tolist()[:8] == [False, True, False, False, False, True, False, False]
    assert not halves[only_padding].any()


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_rows", "features", "num_groups", "num_products"),
    [
        (1, (64, 64), 1, 1),
        (8, (512, 512), 64, 2),
        (300, (64, 1088), 3, 1),
        (1000, (2880, 320), 8, 2),
        (2000, (320, 2880), 8, 1),
        (5000, (2048, 768), 32, 2),
        (5000, (768, 2048), 128, 1),
        (6000, (704, 4608), 4, 1),
    ],
)
def test_of_the_kernel_on_a_gpu(rng, num_rows, features, num_groups, num_products, dtype):
    choice = choose_grouped_matmul(dtype, features, Target.of())
    if choice.name == "xla":
        pytest.skip(f"the kernel {choice.passed_over}")
    assert_is_a_loop_over_groups(
        rng, choice, num_rows, features, num_groups, dtype=dtype, num_products=num_products, rtol=2**-8
    )


def test_a_gpu_gets_the_kernel_and_what_it_cant_serve_is_told(caplog):
    if jax.__version_info__ >= (0, 11):
        assert choose_grouped_matmul("bfloat16", (2048, 768), H200)[:3] == ("mosaic_gpu", 128, None)
    others = {
        "is for Hopper GPUs": ("bfloat16", (64,), dataclasses.replace(H200, compute_capability=8.0)),
        "takes bfloat16 and float16, not float32": ("float32", (64,), H200),
        "takes features in multiples of 64, not 96": ("bfloat16", (64, 96), H200),
    }
    if jax.__version_info__ < (0, 11):
        others = {"needs JAX 0.11": ("bfloat16", (64,), H200)}
    multiply._log_once.cache_clear()  # another test may have heard it
    for reason, arguments in others.items():
        with caplog.at_level("INFO"):
            choice = choose_grouped_matmul(*arguments)
        assert (choice.name, choice.alignment) == ("xla", 1)
        assert reason in choice.passed_over
        assert reason in caplog.text
        with pytest.raises(ValueError, match=reason):
            choose_grouped_matmul(*arguments, "mosaic_gpu")
    with pytest.raises(ValueError, match="'triton' is not one of mosaic_gpu, xla"):
        choose_grouped_matmul("bfloat16", (64,), H200, "triton")
