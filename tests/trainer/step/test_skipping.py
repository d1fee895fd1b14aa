"""Which updates are skipped: those that aren't finite, and spikes of the gradient's norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.step.skipping import NUM_RECENT, Skipping, judge

SKIP_ABOVE = 3.0


@jax.jit
def judge_all(before: Skipping, norms) -> tuple[Skipping, tuple]:
    """Judges norms one after the other; returns what was accepted and what was remembered after each."""

    def step(skipping, norm):
        accepted, after = judge(skipping, jnp.isfinite(norm), norm, SKIP_ABOVE)
        return after, (accepted, after)

    return jax.lax.scan(step, jax.tree.map(jnp.asarray, before), norms)


def test_norms_are_judged_by_the_mean_of_those_accepted_before(rng):
    """Against the rule written out in NumPy, over norms with spikes and with NaN."""
    norms = rng.lognormal(0.0, 0.4, 3 * NUM_RECENT).astype(np.float32)
    spikes = rng.choice(np.arange(NUM_RECENT, 3 * NUM_RECENT), 20, replace=False)
    norms[spikes] = rng.choice([10.0, 50.0, np.nan, np.inf], 20)
    norms[int(rng.integers(5, NUM_RECENT // 2))] = 25.0  # too early to be called a spike
    mean, num_accepted, num_skipped, expected = 0.0, 0, 0, []
    for norm in norms:
        accepted = np.isfinite(norm) and (num_accepted < NUM_RECENT or norm <= SKIP_ABOVE * mean)
        expected.append(accepted)
        num_skipped += not accepted
        if accepted:
            num_accepted += 1
            mean += (norm - mean) / min(num_accepted, NUM_RECENT)
    after, (accepted, history) = judge_all(Skipping(), norms)
    np.testing.assert_array_equal(accepted, expected)
    assert int(after.num_skipped) == num_skipped >= 20
    np.testing.assert_allclose(after.mean_grad_norm, mean, rtol=1e-4)
    in_a_row = 0
    for was_accepted, counted in zip(expected, history.num_in_a_row, strict=True):
        in_a_row = 0 if was_accepted else in_a_row + 1
        assert counted == in_a_row


def test_what_is_remembered_is_all_that_a_verdict_needs(rng):
    """Cut anywhere, the verdicts and the memory are those of the whole, bit for bit."""
    norms = rng.lognormal(0.0, 0.8, 2 * NUM_RECENT).astype(np.float32)
    norms[rng.integers(NUM_RECENT, len(norms))] = 100.0
    cut = int(rng.integers(1, len(norms)))
    whole, (accepted, _) = judge_all(Skipping(), norms)
    half, (first, _) = judge_all(Skipping(), norms[:cut])
    other, (second, _) = judge_all(half, norms[cut:])
    np.testing.assert_array_equal(np.concatenate([first, second]), accepted)
    jax.tree.map(np.testing.assert_array_equal, other, whole)
    assert not np.all(accepted)


@pytest.mark.parametrize("norm", [1e30, np.nan])
def test_without_a_limit_no_finite_norm_is_a_spike(norm):
    before = Skipping()._replace(num_accepted=np.int32(NUM_RECENT), mean_grad_norm=np.float32(1))
    accepted, after = judge(before, jnp.isfinite(norm), jnp.float32(norm), None)
    assert bool(accepted) == np.isfinite(norm) == (int(after.num_skipped) == 0)
