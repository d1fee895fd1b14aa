"""What the Hopper kernels' backward starts from: columns that stand for lse and delta, and zeros."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends.mosaic_gpu.preprocess import preprocess
from kernels.hopper.machine import machine_of
from tests.kernels.gpu_calls import call_of

pytestmark = pytest.mark.jax_0_11
OFFSET_WEIGHTS = np.array([2.0**15, 2.0**4, 2.0**-7, 2.0**-14])


def written_columns(delta, lse, call) -> np.ndarray:
    """The columns that the kernel writes for some queries, which are padded to whole programs."""
    padding = [(0, 0), (0, 0), (0, -delta.shape[-1] % 64)]
    given = [None if x is None else jnp.pad(jnp.asarray(x, jnp.float32), padding) for x in (delta, lse)]
    (columns,) = preprocess(*given, None, call, machine_of(interpret=True))
    assert columns.dtype == call.dtype
    return np.asarray(columns, np.float64)[..., : delta.shape[-1], :]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_an_offset_in_columns_of_16_bits_keeps_its_bits(dtype, rng):
    exponents = rng.uniform(-6, 8, (2, 3, 64))
    offset = (rng.choice([-1.0, 1.0], exponents.shape) * 10**exponents).astype(np.float32)
    call = call_of(dtype=dtype, scale=1.0)[1]
    columns = written_columns(-offset, offset, call)
    # Float16's least normal number, times the least weight, is where it ends.
    np.testing.assert_allclose(columns[..., :4] @ OFFSET_WEIGHTS, offset, rtol=2**-20, atol=2**-28)
    np.testing.assert_array_equal(columns[..., 4:8], -columns[..., :4])
    assert not columns[..., 8:].any()
    alone = written_columns(-offset, None, call)
    np.testing.assert_array_equal(alone[..., :4], columns[..., :4])
    assert not alone[..., 4:].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_an_endless_offset_is_a_large_one(dtype):
    endless = np.array([[[np.inf, 1e30, -np.inf]]])
    # lse of a row that attends to nothing is −inf, and stands for a huge one.
    columns = written_columns(endless[..., :2], endless[..., 1:], call_of(dtype=dtype)[1])
    assert np.isfinite(columns).all()
    assert (columns[..., [0, 4]] * 2.0**15 <= -(2.0**30)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("has_lse", [True, False])
def test_the_preprocess_kernel_writes_offsets_and_zeros(dtype, has_lse, rng):
    shape = (int(rng.integers(1, 3)), int(rng.integers(1, 4)), 64 * int(rng.integers(1, 3)))
    delta, lse = (rng.choice([-1, 1], shape) * 10 ** rng.uniform(-3, 5, shape) for _ in range(2))
    attends_to_nothing = rng.random(shape) < 0.1
    call = call_of(dtype=dtype, scale=float(rng.uniform(0.05, 2)))[1]
    zeros_shape = (1, 8 * int(rng.integers(1, 4)), 1, 64)
    columns, zeros = preprocess(
        jnp.asarray(delta, jnp.float32),
        jnp.asarray(np.where(attends_to_nothing, -np.inf, lse), jnp.float32) if has_lse else None,
        zeros_shape,
        call,
        machine_of(interpret=True),
    )
    # The interpreter fills memory with NaN.
    np.testing.assert_array_equal(np.asarray(zeros), np.zeros(zeros_shape, np.float32))
    assert columns.dtype == dtype
    columns = np.asarray(columns, np.float64)
    np.testing.assert_allclose(columns[..., :4] @ OFFSET_WEIGHTS, -delta, rtol=2**-20, atol=2**-28)
    lse_offset = columns[..., 4:8] @ OFFSET_WEIGHTS
    expected = np.where(attends_to_nothing, lse_offset, -lse / call.scale) if has_lse else np.zeros(shape)
    np.testing.assert_allclose(lse_offset, expected, rtol=2**-20, atol=2**-28)
    assert not has_lse or (lse_offset[attends_to_nothing] <= -(2.0**30)).all()
    assert not columns[..., 8:].any()


def parts_of(offset: np.ndarray) -> np.ndarray:
    """An offset's four bfloat16 numbers, in the order of their weights; NaN's first one is NaN, and so are the rest."""
    rest, parts = np.clip(offset.astype(np.float32), np.float32(-1e38), np.float32(1e38)), []
    for weight in OFFSET_WEIGHTS.astype(np.float32):
        parts.append((rest / weight).astype(jnp.bfloat16).astype(np.float32))
        rest = rest - parts[-1] * weight
    return np.stack(parts, -1)


def test_the_preprocess_kernel_knows_wild_numbers(rng):
    wild = [np.inf, -np.inf, np.nan, 1e30, -1e30, 3e38, -3e38, 1e-30, 1e-40, 0.0, -0.0]
    delta, lse = rng.choice(wild, (2, 2, 1, 64)).astype(np.float32)
    # A power of two, by which a quotient is exact.
    call = call_of(scale=float(2.0 ** rng.integers(-4, 2)))[1]
    columns = written_columns(delta, lse, call)
    # What is below float32's normal numbers may count as 0.
    equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-34)
    equal(columns[..., :4], parts_of(-delta))
    is_huge = lse == -np.inf
    with np.errstate(over="ignore"):
        equal(columns[~is_huge, 4:8], parts_of(-lse / np.float32(call.scale))[~is_huge])
    assert (columns[is_huge, 4] * 2.0**15 <= -(2.0**30)).all()
    assert not columns[..., 8:].any()
