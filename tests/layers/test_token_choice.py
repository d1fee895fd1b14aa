"""Choosing the next token: each transform against a plain loop over the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.token_choice import choose_tokens, keep_top_k, keep_top_p
from trainer.config import SamplesConfig, TokenChoice


def likeliest_first(row):
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def kept_by_top_p(row, p):
    probabilities = np.exp(row.astype(np.float64) - row.max())
    probabilities /= probabilities.sum()
    kept, total = set(), 0.0
    for token in likeliest_first(row):
        if kept and total >= p:
            break
        kept.add(token)
        total += probabilities[token]
    return kept


def kept(logits, outcome):
    """The tokens that each row of the outcome keeps, with their logits as they were."""
    finite = np.isfinite(outcome)
    np.testing.assert_array_equal(outcome[finite], logits[finite])
    assert (outcome[~finite] == -np.inf).all()
    return [set(np.flatnonzero(row)) for row in finite]


@pytest.fixture
def logits(rng):
    """Rows in which some tokens are equally likely."""
    return np.round(rng.normal(0, 2, (5, 30)), 1).astype(np.float32)


@pytest.mark.parametrize("k", [1, 7, 30, 100])
def test_top_k_keeps_the_k_likeliest(logits, k):
    assert kept(logits, np.asarray(keep_top_k(logits, k))) == [set(likeliest_first(row)[:k]) for row in logits]


@pytest.mark.parametrize("p", [1e-6, 0.5, 0.9, 0.99])
def test_top_p_keeps_the_fewest_that_reach_p(rng, p):
    logits = rng.normal(0, 2, (20, 30)).astype(np.float32)
    reached = -np.sort(-np.exp(logits.astype(np.float64)))
    reached = np.cumsum(reached, axis=1) / reached.sum(1, keepdims=True)
    logits = logits[np.abs(reached - p).min(1) > 1e-5][:5]  # in float32, others may reach p a token sooner or later
    assert len(logits) == 5
    assert kept(logits, np.asarray(keep_top_p(logits, p))) == [kept_by_top_p(row, p) for row in logits]


def test_without_temperature_the_likeliest_is_taken(rng, logits):
    keys = jax.random.split(jax.random.key(int(rng.integers(2**32))), len(logits))
    np.testing.assert_array_equal(choose_tokens(logits, keys, temperature=None, top_k=3), logits.argmax(-1))


def test_draws_follow_temperature_top_k_and_top_p_in_this_order(rng):
    row = jnp.asarray(rng.permutation(np.log([0.4, 0.3, 0.2, 0.06, 0.04])), jnp.float32)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**32))), 4000)
    drawn = choose_tokens(jnp.broadcast_to(row, (4000, 5)), keys, temperature=2.0, top_k=4, top_p=0.75)
    # At temperature 2 the likelihoods go by their roots. Of the 4 likeliest the first two have 0.60 and the first three
    # 0.85 of the sum, so that three are left.
    expected = np.sqrt(np.exp(np.asarray(row)))
    expected[np.argsort(row)[:2]] = 0
    expected /= expected.sum()
    counts = np.bincount(drawn, minlength=5)
    assert (counts[expected == 0] == 0).all()
    # 6 standard deviations.
    np.testing.assert_allclose(counts / 4000, expected, atol=6 * 0.5 / np.sqrt(4000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 must be finite and not negative; 0 takes the likeliest"),
        ({"temperature": float("nan")}, r"temperature=nan must be finite"),
        ({"top_k": 0}, r"top_k=0 must be at least 1; None chooses among all tokens"),
        ({"top_p": 0.0}, r"top_p=0.0 must be more than 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1.1 must be more than 0 and at most 1"),
    ],
)
def test_choices_that_make_no_sense_are_refused(fields, message):
    for config in (TokenChoice, SamplesConfig):
        with pytest.raises(ValueError, match=message):
            config(**fields)
    with pytest.raises(ValueError, match=r"samples.num_tokens=0 must be at least 1"):
        SamplesConfig(num_tokens=0)
