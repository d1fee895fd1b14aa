"""Schedules at their joints, the decay mask by name, and AdamW against one written out in NumPy."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.config import OptimizerConfig
from trainer.step.optimizer import decay_mask, make_optimizer, make_schedule
from trainer.step.sharding import path_name


def learning_rates(num_steps: int, **options) -> np.ndarray:
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, **options), num_steps)
    return np.array([float(schedule(count)) for count in range(num_steps)])


def rate_in_python(config: OptimizerConfig, num_steps: int, update: int) -> Fraction:
    """The learning rate of update 1, 2, …, as the docstring tells it."""
    peak, final = Fraction(config.learning_rate), Fraction(config.learning_rate * config.final_learning_rate_fraction)
    if update == num_steps:
        return final
    if update <= config.num_warmup_steps:
        return peak * update / config.num_warmup_steps
    if config.schedule == "cosine":
        decayed = Fraction(update - config.num_warmup_steps, num_steps - config.num_warmup_steps)
        decayed = Fraction((1 - math.cos(math.pi * decayed)) / 2)
    else:
        length = max(1, round(config.decay_fraction * num_steps))
        decayed = Fraction(max(update - (num_steps - length), 0), length)
    return peak + (final - peak) * decayed


# The cosine and the wsd schedule that runs use, in any case.
@example(50, "cosine", 10, 0.2, 0.1, 1.0)
@example(50, "wsd", 10, 0.2, 0.0, 1.0)
@example(100, "wsd", 0, 0.2, 0.1, 1.0)
@given(
    num_steps=st.one_of(st.integers(1, 12), st.integers(1, 2**31 - 1)),
    schedule=st.sampled_from(["cosine", "wsd"]),
    num_warmup_steps=st.one_of(st.integers(0, 12), st.floats(0, 1)),
    # Less is 0 in float32, and refused as such.
    decay_fraction=st.one_of(st.sampled_from([0.0, 1e-12, 0.2, 1.0]), st.floats(1e-30, 1)),
    final=st.one_of(st.sampled_from([0.0, 1e-9, 0.1, 1.0]), st.floats(1e-30, 1)),
    learning_rate=st.sampled_from([1.0, 6e-4, 3e-3]),
)
@settings(max_examples=50)
def test_every_schedule_against_one_in_fractions(
    num_steps, schedule, num_warmup_steps, decay_fraction, final, learning_rate
):
    if isinstance(num_warmup_steps, float):
        num_warmup_steps = round(num_warmup_steps * num_steps)
    try:
        fractions = {"decay_fraction": decay_fraction, "final_learning_rate_fraction": final}
        config = OptimizerConfig(learning_rate, schedule, num_warmup_steps=num_warmup_steps, **fractions)
        rate = make_schedule(config, num_steps)
    except ValueError:
        fewest = 0 if final == 1 else 1 if schedule == "cosine" else max(1, round(decay_fraction * num_steps))
        no_decay = schedule == "wsd" and decay_fraction == 0 and final < 1
        assert no_decay or num_warmup_steps + (fewest or round(decay_fraction * num_steps)) > num_steps
        return
    stable_ends = num_steps - config.num_decay_steps(num_steps)
    joints = (1, num_warmup_steps, stable_ends, num_steps)
    updates = [min(max(joint + by, 1), num_steps) for joint in joints for by in (-1, 0, 1)]
    # One that is asked for past the end has the last one's.
    actual = np.asarray(rate(np.array([update - 1 for update in updates] + [num_steps, 2**31 - 1], np.int32)))
    expected = [float(rate_in_python(config, num_steps, update)) for update in updates]
    np.testing.assert_allclose(actual[:-2], expected, rtol=1e-6, atol=2e-7 * learning_rate)
    assert np.all(actual[[-3, -2, -1]] == np.float32(learning_rate * final))
    if 1 <= num_warmup_steps < num_steps:
        assert actual[updates.index(num_warmup_steps)] == np.float32(learning_rate)


def test_steps_past_float32s_integers_are_told_apart():
    rates = make_schedule(OptimizerConfig(learning_rate=1.0, num_warmup_steps=0, final_learning_rate_fraction=0), 2**25)
    assert float(rates(2**25 - 2)) > 0.0 == float(rates(2**25 - 1))


@pytest.mark.parametrize(
    ("schedule", "num_steps", "num_warmup_steps", "remedy"),
    [("cosine", 10, 11, 9), ("cosine", 10, 10, 9), ("cosine", 1, 1, 0), ("wsd", 10, 9, 8), ("wsd", 2, 2, 1)],
)
def test_a_schedule_longer_than_the_run_is_refused(schedule, num_steps, num_warmup_steps, remedy):
    config = OptimizerConfig(schedule=schedule, num_warmup_steps=num_warmup_steps, decay_fraction=0.2)
    with pytest.raises(
        ValueError, match=f"num_warmup_steps={num_warmup_steps} .* num_steps={num_steps} .*at most {remedy}"
    ):
        make_schedule(config, num_steps)


def test_warmup_may_fill_a_run_that_ends_at_the_peak():
    for schedule in ("cosine", "wsd"):
        fractions = {"decay_fraction": 0, "final_learning_rate_fraction": 1}
        rates = learning_rates(10, schedule=schedule, num_warmup_steps=10, **fractions)
        np.testing.assert_allclose(rates, np.arange(1, 11) / 10, rtol=1e-6)


def test_a_final_rate_that_no_step_decays_to_is_refused():
    with pytest.raises(ValueError, match=r"decay_fraction=0 leaves no step .*learning_rate_fraction=0\.1 .* to 1"):
        OptimizerConfig(schedule="wsd", decay_fraction=0)
    assert OptimizerConfig(schedule="cosine", decay_fraction=0).num_decay_steps(200) == 100


def test_decay_goes_by_name():
    # Stacked over layers, a norm's scale and the sinks are matrices, as kernels are.
    attention = {"query": {"kernel": (3, 4, 2, 2)}, "sinks": (3, 2)}
    mlp = {"up": {"kernel": (3, 4, 8), "bias": (3, 8)}}
    blocks = {0: {"attention": attention, "mlp": mlp, "mlp_norm": {"scale": (3, 4)}}}
    shapes = {"embedding": {"embedding": (8, 4)}, "final_norm": {"scale": (4,)}, "blocks": blocks}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    decayed = {path_name(path): decays for path, decays in jax.tree_util.tree_flatten_with_path(decay_mask(params))[0]}
    names = {"embedding.embedding", "blocks.0.attention.query.kernel", "blocks.0.mlp.up.kernel"}
    assert len(decayed) == 7
    assert {name for name, decays in decayed.items() if decays} == names


def test_a_parameter_of_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"no parameter named 'gain' \(blocks\.0\.gain\).*NOT_DECAYED"):
        decay_mask({"blocks": {0: {"gain": jnp.zeros(3)}}})


def test_updates_match_adamw_in_numpy(rng):
    config = OptimizerConfig(learning_rate=0.1, num_warmup_steps=2, weight_decay=0.5, clip_norm=2.0)
    num_steps = 6
    params = {"kernel": rng.standard_normal((4, 3)), "scale": rng.standard_normal((2, 3))}
    gradients = [{name: 3 * rng.standard_normal(x.shape) for name, x in params.items()} for _ in range(num_steps)]
    gradients[1] = {name: 0.01 * x for name, x in gradients[1].items()}  # one too small to be clipped

    optimizer, schedule = make_optimizer(config, num_steps), make_schedule(config, num_steps)
    actual = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    state = optimizer.init(actual)
    for gradient in gradients:
        updates, state = optimizer.update({k: jnp.asarray(g, jnp.float32) for k, g in gradient.items()}, state, actual)
        actual = optax.apply_updates(actual, updates)

    first = {name: np.zeros_like(x) for name, x in params.items()}
    second = {name: np.zeros_like(x) for name, x in params.items()}
    for step, gradient in enumerate(gradients, start=1):
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        for name, g in gradient.items():
            g = g * min(1.0, config.clip_norm / norm)
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * g**2
            corrected = first[name] / (1 - config.beta1**step), second[name] / (1 - config.beta2**step)
            update = corrected[0] / (np.sqrt(corrected[1]) + config.epsilon)
            decay = config.weight_decay if name == "kernel" else 0.0
            params[name] = params[name] - float(schedule(step - 1)) * (update + decay * params[name])
    for name, expected in params.items():
        np.testing.assert_allclose(actual[name], expected, rtol=1e-4, atol=1e-5)
