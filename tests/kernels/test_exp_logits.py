"""Exponentials of logits, and their sums, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Target
from kernels.loss.exp_logits import ExpLogits, unsupported_reason

HOPPER = Target("gpu", "NVIDIA H200", 9.0, 132)


def draw(rng, num_tokens, width, vocab_size):
    hidden = jnp.asarray(rng.standard_normal((num_tokens, width)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((width, vocab_size)) / width**0.5, jnp.bfloat16)
    return hidden, head, jnp.asarray(3 * rng.standard_normal(num_tokens), jnp.float32)


def assert_are_exponentials(kernel, hidden, head, shifts, soft_cap):
    exponentials, sums = jax.jit(lambda *arrays: kernel(*arrays, soft_cap=soft_cap))(hidden, head, shifts)
    assert (exponentials.dtype, sums.dtype) == (jnp.bfloat16, jnp.float32)
    logits, slopes = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64), 1.0
    if soft_cap is not None:
        logits, slopes = soft_cap * np.tanh(logits / soft_cap), np.cosh(logits / soft_cap) ** -2.0
    expected = np.exp(logits - np.asarray(shifts, np.float64)[:, None])
    # Rounded to 8 bits. A slope near a cap is a difference of nearly equal numbers.
    np.testing.assert_allclose(np.asarray(exponentials, np.float64), expected * slopes, rtol=2**-8 + 1e-3, atol=1e-30)
    np.testing.assert_allclose(sums, expected.sum(1), rtol=3e-5)


SHAPES = [(256, 64, 256), (100, 128, 192), (300, 64, 128), (257, 64, 320)]  # with tiles of each number of columns


@pytest.mark.sample(3)
@pytest.mark.jax_0_11
@pytest.mark.parametrize(("num_tokens", "width", "vocab_size"), SHAPES)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_in_the_interpreter(rng, num_tokens, width, vocab_size, soft_cap):
    kernel = ExpLogits(Target.of(), interpret=True)
    assert_are_exponentials(kernel, *draw(rng, num_tokens, width, vocab_size), soft_cap)


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("num_tokens", "width", "vocab_size"), [*SHAPES, (1, 64, 64), (8191, 768, 50304), (500, 2048, 4096)]
)
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_on_a_gpu(rng, num_tokens, width, vocab_size, soft_cap):
    assert_are_exponentials(ExpLogits(Target.of()), *draw(rng, num_tokens, width, vocab_size), soft_cap)


def assert_sums_near_a_cap_are_exact(rng, kernel):
    """Of tokens that are sure of a target whose logit is near the cap: their gradient is a sum's distance from 1."""
    hidden, head, _ = draw(rng, 130, 64, 128)
    hidden *= 10
    logits = 30 * np.tanh(np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / 30)
    shifts = jnp.asarray(logits.max(1), jnp.float32)
    _, sums = kernel(hidden, head, shifts, soft_cap=30.0)
    expected = np.exp(logits - np.asarray(shifts, np.float64)[:, None]).sum(1)
    np.testing.assert_allclose(sums, expected, rtol=3e-5)


@pytest.mark.jax_0_11
def test_sums_near_a_cap_in_the_interpreter(rng):
    assert_sums_near_a_cap_are_exact(rng, ExpLogits(Target.of(), interpret=True))


@pytest.mark.gpu
@pytest.mark.jax_0_11
def test_sums_near_a_cap_on_a_gpu(rng):
    assert_sums_near_a_cap_are_exact(rng, ExpLogits(Target.of()))


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("dtype", "width", "vocab_size"), [("float32", 64, 64), ("bfloat16", 100, 64), ("bfloat16", 64, 100)]
)
def test_what_it_does_not_take_is_refused(dtype, width, vocab_size):
    arrays = jnp.zeros((8, width), dtype), jnp.zeros((width, vocab_size), dtype), jnp.zeros(8)
    with pytest.raises(ValueError, match=r"can't be computed by the kernel: it takes .* not .*; compute the logits"):
        ExpLogits(Target.of(), interpret=True)(*arrays)


@pytest.mark.jax_0_11
def test_what_float32_does_not_hold_is_infinite(rng):
    hidden, head, shifts = draw(rng, 64, 64, 64)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    shifts = jnp.asarray(logits.max(1) - 100.0, jnp.float32)
    exponentials, sums = ExpLogits(Target.of(), interpret=True)(hidden, head, shifts)
    assert np.isinf(sums).all()
    assert np.isinf(np.asarray(exponentials, np.float64)).any(1).all()


@pytest.mark.parametrize(
    ("dtype", "width", "vocab_size", "target", "reason"),
    [
        ("bfloat16", 768, 50304, Target("gpu", "NVIDIA B200", 10.0, 148), "is for Hopper GPUs"),
        ("bfloat16", 768, 50304, Target("cpu", "cpu"), "is for Hopper GPUs"),
        ("float16", 768, 50304, HOPPER, "takes bfloat16, not float16"),
        ("float32", 768, 50304, HOPPER, "takes bfloat16, not float32"),
        ("bfloat16", 768, 50257, HOPPER, "not 50257"),
        ("bfloat16", 100, 50304, HOPPER, "not 100"),
        ("bfloat16", 768, 50304, HOPPER, None),
    ],
)
def test_why_it_does_not_serve(dtype, width, vocab_size, target, reason):
    found = unsupported_reason(jnp.dtype(dtype), width, vocab_size, target)
    if jax.__version_info__ < (0, 11) and target == HOPPER:
        assert found is not None
        assert "needs JAX 0.11" in found
    else:
        assert found is None if reason is None else reason in (found or "")
