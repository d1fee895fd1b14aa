"""Rotary embedding against its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import RopeScaling, apply_rope
from layers.rotary import attention_factor, inverse_frequencies
from tests.layers import decoder_oracle


def rotated(inputs, positions, base=10_000.0):
    """RoPE as its paper has it: the pair (i, i + H/2) as a complex number, turned by position · base^(−2i/H)."""
    half = inputs.shape[-1] // 2
    pairs = inputs[..., :half].astype(np.float64) + 1j * inputs[..., half:]
    angles = positions[..., None, None] * base ** (-np.arange(half) / half)
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("first_position", [0, 32_768, 2**20])
def test_matches_definition_at_any_position(rng, first_position):
    inputs = rng.standard_normal((2, 16, 3, 64)).astype(np.float32)
    positions = first_position + rng.integers(0, 4096, (2, 16)).astype(np.int32)
    # In radians, all of it: the product of a float32 frequency and position alone would be off by 0.03 at 2^20.
    largest_pair = np.hypot(*np.split(inputs, 2, axis=-1)).max()
    np.testing.assert_allclose(apply_rope(inputs, positions), rotated(inputs, positions), atol=5e-4 * largest_pair)


def test_refuses_positions_that_32_bits_would_cut():
    with pytest.raises(ValueError, match=r"positions reaches from 4294967296 to 4294967297, beyond int32"):
        apply_rope(jnp.ones((1, 2, 1, 8)), np.array([[2**32, 2**32 + 1]]))
    with pytest.raises(ValueError, match=r"positions must be integers, got float32\(1, 2\)"):
        apply_rope(jnp.ones((1, 2, 1, 8)), jnp.array([[0.5, 1.5]]))


def random_scaling(kind, num_pairs, rng):
    fast, slow = np.sort(rng.uniform(0.5, 40.0, 2))[::-1]
    arguments = {"factor": float(rng.uniform(1.0, 32.0)), "original_context_length": int(rng.integers(16, 16_384))}
    if kind == "yarn":
        arguments |= {"beta_fast": float(fast), "beta_slow": float(slow), "truncate": bool(rng.integers(2))}
    elif kind == "longrope":
        short, long = rng.uniform(1.0, 60.0, (2, num_pairs)).tolist()
        arguments |= {"short_factors": tuple(short), "long_factors": tuple(long)}
    return RopeScaling(kind, **arguments)


@pytest.mark.parametrize("kind", ["linear", "ntk", "llama3", "yarn", "longrope"])
def test_every_frequency_and_the_stretch_follow_the_published_rule(rng, kind):
    for _ in range(50):
        num_pairs, base = int(rng.integers(2, 65)), float(rng.choice([100.0, 10_000.0, 1e6]))
        scaling = random_scaling(kind, num_pairs, rng)
        context_length = scaling.original_context_length + int(rng.integers(0, 2))
        print(num_pairs, base, context_length, scaling)
        expected = [
            decoder_oracle.frequency(pair, 2 * num_pairs, base, scaling, context_length) for pair in range(num_pairs)
        ]
        np.testing.assert_allclose(
            inverse_frequencies(2 * num_pairs, base, scaling, context_length), expected, rtol=1e-12
        )
        assert attention_factor(scaling) == pytest.approx(decoder_oracle.stretch(scaling), rel=1e-12)


def test_yarn_in_the_numbers_of_gpt_oss():
    """32 times 4,096 tokens: of 32 frequencies the first 9 stay and the last 14 are divided."""
    scaling = RopeScaling("yarn", 32.0, original_context_length=4096, truncate=False)
    ratios = inverse_frequencies(64, 150_000.0, RopeScaling()) / inverse_frequencies(64, 150_000.0, scaling)
    np.testing.assert_allclose(ratios[:9], 1.0)
    assert (np.diff(ratios[8:19]) > 0).all()
    np.testing.assert_allclose(ratios[18:], 32.0)
    assert attention_factor(scaling) == pytest.approx(1.3465735902799727)


def test_a_fraction_of_the_features_turns_and_the_rest_stays(rng):
    inputs = rng.standard_normal((1, 8, 2, 20)).astype(np.float32)
    positions = rng.integers(0, 1000, (1, 8)).astype(np.int32)
    outputs = apply_rope(inputs, positions, fraction=0.4)
    np.testing.assert_allclose(outputs[..., :8], rotated(inputs[..., :8], positions), atol=1e-3)
    np.testing.assert_array_equal(outputs[..., 8:], inputs[..., 8:])


def test_longrope_is_refused_without_the_length_of_the_context():
    scaling = RopeScaling("longrope", short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    with pytest.raises(ValueError, match="takes its short or its long factors by the length of the context; give cont"):
        apply_rope(jnp.ones((1, 2, 1, 8)), jnp.arange(2)[None], scaling=scaling)


def test_gradient_turns_back(rng):
    inputs = jnp.asarray(rng.standard_normal((1, 8, 2, 16)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 1000, (1, 8)), jnp.int32)
    turned, vjp = jax.vjp(lambda x: apply_rope(x, positions), inputs)
    np.testing.assert_allclose(vjp(turned)[0], inputs, atol=1e-5)
