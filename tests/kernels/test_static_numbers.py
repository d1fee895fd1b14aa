"""Scale and soft cap: the numbers that are taken, and what is refused at every way in."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels import SlabCache, decode_attention, dot_product_attention
from kernels.arguments.static_numbers import checked_scale, checked_soft_cap

X = jnp.ones((1, 4, 2, 8))
CACHE = SlabCache.empty(1, 8, 2, 8, dtype=jnp.float32)
ATTEND = {
    "dot_product_attention": functools.partial(dot_product_attention, X, X, X),
    "decode_attention": functools.partial(decode_attention, X, CACHE),
}
SOFT_CAP_TOO = pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])


@SOFT_CAP_TOO
@pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "=nan must be finite"),
        (-np.inf, "=-inf must be finite"),
        (jnp.asarray(np.inf), "=inf must be finite"),
        (1e39, "=1e+39 must be finite and in float32's range"),
        (1e-39, "=1e-39 must be finite and in float32's range"),
        (10**400, "=inf must be finite"),
        (True, " must be a real number, got True of type bool"),
        (np.bool_(True), " must be a real number, got "),
        ("0.5", " must be a real number, got '0.5' of type str"),
        (1j, " must be a real number, got 1j of type complex"),
        (np.ones(1), " must be a real number, got array([1.]) of type ndarray"),
    ],
    ids=repr,
)
def test_what_is_no_finite_number_is_refused(attend, name, value, message):
    with pytest.raises(ValueError, match=f"^{name}{re.escape(message)}"):
        attend(**{name: value})


@SOFT_CAP_TOO
@pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
def test_a_traced_number_is_refused_with_the_remedy(attend, name):
    message = rf"^{name} is traced \(float32\[\]\), but it must be a Python number.*static_argnames='{name}'"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda value: attend(**{name: value}), 0.5)


@pytest.mark.parametrize("kind", [int, np.float64, np.int8, np.asarray, jnp.asarray, ml_dtypes.bfloat16])
def test_numbers_of_all_kinds_are_taken(kind):
    for number in (checked_scale(kind(2)), checked_soft_cap(kind(2))):
        assert type(number) is float
        assert number == 2


def test_a_scale_may_be_negative_or_zero_and_a_cap_may_not(rng):
    assert checked_scale(-0.5) == -0.5
    for cap in (-0.5, 0):
        with pytest.raises(ValueError, match="must be positive; None turns it off"):
            checked_soft_cap(cap)
    for cap in (1.1e30, 1e37, 3e38):
        with pytest.raises(ValueError, match=r"must be at most 1e\+30: so large a cap bounds nothing; use None"):
            checked_soft_cap(cap)
    value = jnp.asarray(rng.standard_normal((1, 4, 2, 8)), jnp.float32)
    for implementation in ("reference", "blockwise"):
        output = dot_product_attention(100 * value, value, value, scale=0, implementation=implementation)
        np.testing.assert_allclose(output, np.broadcast_to(value.mean(1, keepdims=True), value.shape), atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_the_largest_cap_changes_nothing(implementation, rng):
    x = jnp.asarray(rng.standard_normal((3, 1, 5, 2, 8)), jnp.float32)
    capped = dot_product_attention(*x, logits_soft_cap=1e30, implementation=implementation)
    np.testing.assert_allclose(capped, dot_product_attention(*x, implementation=implementation), rtol=0, atol=1e-6)
