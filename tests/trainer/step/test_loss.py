"""The chunked loss against a dense one in float64, and the promise that [tokens, vocabulary] never exists."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kernels import Target
from kernels.loss.exp_logits import ExpLogits
from trainer.step.loss import chunked_cross_entropy


def make_inputs(rng, batch_size=2, length=37, width=16, vocab_size=50):
    hidden = rng.standard_normal((batch_size, length, width)).astype(np.float32)
    head = rng.standard_normal((width, vocab_size)).astype(np.float32)
    targets = rng.integers(0, vocab_size, (batch_size, length)).astype(np.int32)
    return hidden, head, targets, (rng.random((batch_size, length)) < 0.8).astype(np.float32)


def draw_weights(rng, shape):
    """A fifth are 0. The others have either sign, and sizes that differ by orders of magnitude."""
    return (np.exp(rng.normal(0, 3, shape)) * rng.choice([-1, 0, 1], shape, p=(0.3, 0.2, 0.5))).astype(np.float32)


def dense_oracle(hidden, head, targets, weights, z_loss, cap=None):
    """Sums of nats and z, and the gradients of their total, in float64 with whole logits."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    logits = hidden @ head
    slope = 1.0
    if cap is not None:
        logits, slope = cap * np.tanh(logits / cap), np.cosh(logits / cap) ** -2.0
    highest = logits.max(-1, keepdims=True)
    log_partition = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    is_target = targets[..., None] == np.arange(head.shape[1])
    weights = weights.astype(np.float64)
    nats = ((log_partition - logits)[is_target].reshape(targets.shape) * weights).sum()
    z = z_loss * (np.square(log_partition[..., 0]) * np.abs(weights)).sum()
    of_nats = weights[..., None] * (np.exp(logits - log_partition) - is_target)
    of_z = np.abs(weights)[..., None] * 2 * z_loss * log_partition * np.exp(logits - log_partition)
    d_logits = (of_nats + of_z) * slope
    return nats, z, d_logits @ head.T, np.einsum("btd,btv->dv", hidden, d_logits)


def value_and_gradients(hidden, head, targets, weights, **options):
    def total(hidden, head):
        loss = chunked_cross_entropy(hidden, head, targets, weights, **options)
        return loss.total, loss

    gradients, loss = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(hidden, head)
    return loss, gradients


@pytest.mark.parametrize(("chunk_size", "cap"), [(1, None), (16, 8.0), (16, None), (37, None), (1000, 8.0)])
def test_matches_dense_float64(rng, chunk_size, cap):
    inputs = make_inputs(rng)
    nats, z, d_hidden, d_head = dense_oracle(*inputs, z_loss=1e-2, cap=cap)
    loss, gradients = value_and_gradients(*inputs, chunk_size=chunk_size, z_loss=1e-2, logits_soft_cap=cap)
    np.testing.assert_allclose(loss.nats, nats, rtol=1e-5)
    np.testing.assert_allclose(loss.z, z, rtol=1e-5)
    np.testing.assert_allclose(loss.total, nats + z, rtol=1e-5)
    assert loss.num_targets == inputs[3].sum()
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], d_head, rtol=1e-4, atol=1e-4)


def test_value_is_the_same_without_differentiation(rng):
    inputs, options = make_inputs(rng), {"chunk_size": 8, "z_loss": 1e-4}
    with_gradients, _ = value_and_gradients(*inputs, **options)
    np.testing.assert_allclose(chunked_cross_entropy(*inputs, **options).total, with_gradients.total, rtol=1e-6)


def test_bfloat16_activations_keep_a_float32_head_gradient(rng):
    inputs = make_inputs(rng)
    arrays = jnp.asarray(inputs[0], jnp.bfloat16), *inputs[1:]
    assert_is_dense(*value_and_gradients(*arrays, chunk_size=16, z_loss=0.0), *inputs, z_loss=0.0)


def test_head_gradient_accumulates_in_float32():
    # 512 equal chunks: a bfloat16 sum would stop growing at 256 of them.
    hidden = jnp.ones((1, 8192, 1), jnp.bfloat16)
    targets, weights = np.zeros((1, 8192), np.int32), np.ones((1, 8192), np.float32)
    head = np.zeros((1, 2), np.float32)
    _, gradients = value_and_gradients(hidden, head, targets, weights, chunk_size=16, z_loss=0.0)
    np.testing.assert_allclose(gradients[1], [[-4096.0, 4096.0]], rtol=1e-6)


def test_tokens_of_weight_0_have_no_effect_and_no_gradient(rng):
    hidden, head, targets, weights = make_inputs(rng)
    loss, (d_hidden, d_head) = value_and_gradients(hidden, head, targets, weights, chunk_size=8, z_loss=1e-3)
    is_counted = weights != 0
    assert not np.any(np.asarray(d_hidden)[~is_counted])
    other = np.where(is_counted[..., None], hidden, rng.standard_normal(hidden.shape)).astype(np.float32)
    other_targets = np.where(is_counted, targets, 0)
    other_loss, (_, other_d_head) = value_and_gradients(other, head, other_targets, weights, chunk_size=8, z_loss=1e-3)
    assert loss.total == other_loss.total
    np.testing.assert_array_equal(d_head, other_d_head)


def test_nothing_to_predict_is_zero(rng):
    hidden, head, targets, weights = make_inputs(rng)
    loss, gradients = value_and_gradients(hidden, head, targets, np.zeros_like(weights), chunk_size=8, z_loss=1e-3)
    assert (float(loss.total), float(loss.weight_sum), int(loss.num_targets)) == (0.0, 0.0, 0)
    assert not any(np.any(gradient) for gradient in gradients)


def test_large_logits_stay_finite(rng):
    hidden, head, targets, weights = make_inputs(rng)
    nats, _, d_hidden, _ = dense_oracle(1e3 * hidden, head, targets, weights, z_loss=0.0)
    loss, gradients = value_and_gradients(1e3 * hidden, head, targets, weights, chunk_size=8, z_loss=0.0)
    np.testing.assert_allclose(loss.nats, nats, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-2, atol=1e-2)


def test_gradient_scales_with_the_cotangent_and_only_total_has_one(rng):
    hidden, head, targets, weights = make_inputs(rng)

    def gradient_of(function):
        def value(hidden):
            return function(chunked_cross_entropy(hidden, head, targets, weights, chunk_size=8, z_loss=1e-2))

        return jax.grad(value)(hidden)

    np.testing.assert_allclose(
        gradient_of(lambda loss: 3.0 * loss.total), 3.0 * gradient_of(lambda loss: loss.total), rtol=1e-6
    )
    assert not np.any(gradient_of(lambda loss: loss.nats + loss.z))


def value_and_gradients_both_ways(hidden, head, targets, weights, **options):
    """By exponentials, and by logits, in bfloat16."""
    arrays = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head), targets, weights
    kernels = ExpLogits(Target.of(), interpret=True), None
    return [value_and_gradients(*arrays, **options, exp_logits=kernel) for kernel in kernels]


def rounded(array):
    return np.asarray(jnp.asarray(array, jnp.bfloat16), np.float32)


def assert_is_dense(loss, gradients, hidden, head, targets, weights, z_loss, cap=None):
    """Against float64 of the rounded arrays."""
    nats, z, d_hidden, d_head = dense_oracle(rounded(hidden), rounded(head), targets, weights, z_loss=z_loss, cap=cap)
    np.testing.assert_allclose(loss.nats, nats, rtol=1e-4)
    np.testing.assert_allclose(loss.z, z, rtol=1e-4)
    assert loss.num_targets == (weights != 0).sum()
    assert gradients[0].dtype == jnp.bfloat16
    assert gradients[1].dtype == jnp.float32
    assert relative_error(gradients[0].astype(np.float32), d_hidden) < 1e-2
    assert relative_error(gradients[1], d_head) < 1e-2


def tells_apart(one, other) -> bool:
    """Whether gradients of hidden states were rounded in different ways. A sum in another order changes a few."""
    return float(np.mean(np.asarray(one[1][0]) != np.asarray(other[1][0]))) > 0.05


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("chunk_size", "cap", "z_loss"), [(64, None, 1e-3), (1000, 3.0, 1e-3), (100, None, 0.0)], ids=repr
)
def test_exponentials_match_dense_float64(rng, chunk_size, cap, z_loss):
    inputs = make_inputs(rng, 2, 95, 64, 192)
    inputs[3][:] *= rng.choice([0.25, 1, 3, -0.5], inputs[3].shape, p=(0.3, 0.3, 0.3, 0.1))
    options = {"chunk_size": chunk_size, "z_loss": z_loss, "logits_soft_cap": cap}
    of_exponentials, of_logits = value_and_gradients_both_ways(*inputs, **options)
    assert_is_dense(*of_exponentials, *inputs, z_loss, cap)
    assert tells_apart(of_exponentials, of_logits)
    assert of_exponentials[0].num_recomputed == 0
    assert not np.any(np.asarray(of_exponentials[1][0], np.float32)[inputs[3] == 0])


@pytest.mark.jax_0_11
def test_sums_that_float32_does_not_hold_are_computed_from_logits(rng):
    hidden, head, targets, weights = make_inputs(rng, 1, 70, 64, 64)
    hidden[0, 5] *= 100
    targets[0, 5] = (hidden[0, 5] @ head).argmin()  # a sure target's sum would be 1
    for weight in (1, 0):  # a token of weight 0 has exponentials, too
        weights[0, 5] = weight
        of_exponentials, of_logits = value_and_gradients_both_ways(
            hidden, head, targets, weights, chunk_size=32, z_loss=0.0
        )
        assert_is_dense(*of_exponentials, hidden, head, targets, weights, z_loss=0.0)
        assert not tells_apart(of_exponentials, of_logits)
        assert (of_exponentials[0].num_recomputed, of_logits[0].num_recomputed) == (1, 0)


@pytest.mark.jax_0_11
def test_a_z_loss_that_turns_gradients_over_is_computed_from_logits(rng):
    inputs = make_inputs(rng, 1, 70, 64, 64)
    inputs = np.abs(inputs[0]), -np.abs(inputs[1]) / 4, *inputs[2:]  # log-partitions of about -6
    of_exponentials, of_logits = value_and_gradients_both_ways(*inputs, chunk_size=32, z_loss=0.2)
    assert_is_dense(*of_exponentials, *inputs, z_loss=0.2)
    assert not tells_apart(of_exponentials, of_logits)


@pytest.mark.jax_0_11
def test_a_nan_stays_one(rng):
    hidden, *others = make_inputs(rng, 1, 70, 64, 64)
    hidden[0, 3] = np.nan
    (loss, gradients), _ = value_and_gradients_both_ways(hidden, *others, chunk_size=32, z_loss=0.0)
    assert np.isnan(loss.total) == (others[2][0, 3] != 0)
    assert np.isnan(np.asarray(gradients[1])).any()


def exact_exponentials(hidden, head, shifts, *, soft_cap):
    """What `kernels.loss.exp_logits.ExpLogits` computes, without rounding."""
    logits = hidden @ head
    slopes = 1.0
    if soft_cap is not None:
        logits, slopes = soft_cap * jnp.tanh(logits / soft_cap), 1 / jnp.cosh(logits / soft_cap) ** 2
    terms = jnp.exp(logits - shifts[:, None])
    return terms * slopes, terms.sum(1)


@pytest.mark.parametrize(("weight", "num_recomputed"), [(-1.0, 0), (1e-25, 1)])
def test_a_weight_that_would_be_lost_in_float32_is_computed_from_logits(weight, num_recomputed, rng):
    hidden, head, targets, weights = make_inputs(rng, 1)
    logits = hidden[0, 5] @ head
    hidden[0, 5] *= 45 / np.ptp(logits)
    targets[0, 5] = logits.argmin()  # its probability is about 1e-20
    weights[:] = weight * (np.arange(weights.size) == 5)
    inputs = hidden, head, targets, weights
    options = {"chunk_size": 16, "z_loss": 1e-3}
    loss, gradients = value_and_gradients(*inputs, **options, exp_logits=exact_exponentials)
    assert loss.num_recomputed == num_recomputed
    for found, expected in zip((loss.nats, loss.z, *gradients), dense_oracle(*inputs, 1e-3), strict=True):
        assert relative_error(found, expected) < 1e-4


@pytest.mark.usefixtures("eight_devices", "float64")
@pytest.mark.parametrize(("cap", "is_held"), [(None, True), (3.0, True), (None, False)])
def test_devices_that_share_the_tokens_out_recompute_each_for_itself(cap, is_held, rng):
    """Three devices, in float64."""
    length, num_devices, z_loss = 94, 3, 1e-2
    hidden, head, targets, weights = make_inputs(rng, 2, length, 16, 48)
    if not is_held:
        # The second device's part of the first row has a token whose target is unlikely beyond float32's range.
        hidden[0, length // 2] *= 100
        targets[0, length // 2] = (hidden[0, length // 2] @ head).argmin()
    inputs = hidden.astype(np.float64), head.astype(np.float64), targets, weights
    options = {"chunk_size": 16, "z_loss": z_loss, "logits_soft_cap": cap}
    mesh = jax.make_mesh((num_devices,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    with jax.set_mesh(mesh):
        loss, gradients = value_and_gradients(*inputs, **options, shared_over="tensor", exp_logits=exact_exponentials)
    for found, expected in zip((loss.nats, loss.z, *gradients), dense_oracle(*inputs, z_loss, cap), strict=True):
        assert relative_error(found, expected) < 1e-12
    assert loss.weight_sum == loss.num_targets == weights.sum()
    assert loss.num_recomputed == (not is_held)


@pytest.mark.usefixtures("eight_devices", "float64")
@pytest.mark.parametrize("exp_logits", [None, exact_exponentials], ids=["logits", "exponentials"])
@pytest.mark.parametrize(("num_devices", "cap"), [(1, None), (3, 3.0)])
def test_weights_multiply_nats_with_their_sign_and_z_without(exp_logits, num_devices, cap, rng):
    hidden, head, targets, _ = make_inputs(rng, 2, 94, 16, 48)
    weights = draw_weights(rng, targets.shape)
    inputs = hidden.astype(np.float64), head.astype(np.float64), targets, weights
    options = {"chunk_size": 16, "z_loss": 1e-2, "logits_soft_cap": cap, "exp_logits": exp_logits}
    mesh = jax.make_mesh((num_devices,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    with jax.set_mesh(mesh):
        options["shared_over"] = "tensor" if num_devices > 1 else None
        loss, gradients = value_and_gradients(*inputs, **options)
    expected = dense_oracle(*inputs, 1e-2, cap)
    for found, dense in zip((loss.nats, loss.z, *gradients), expected, strict=True):
        assert relative_error(found, dense) < 1e-12
    assert relative_error(loss.weight_sum, np.abs(weights, dtype=np.float64).sum()) < 1e-12
    assert (loss.num_targets, loss.num_recomputed) == ((weights != 0).sum(), 0)


def largest_array(function, *args) -> int:
    """Elements of the largest array in the optimised program."""
    program = jax.jit(function).lower(*args).compile().as_text()
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", program)
    assert shapes
    return max(int(np.prod([int(length) for length in shape.split(",")])) for shape in shapes)


def test_no_array_of_tokens_by_vocabulary(rng):
    length, width, vocab_size, chunk_size = 512, 8, 300, 32
    hidden, head, targets, weights = make_inputs(rng, 1, length, width, vocab_size)

    def chunked(hidden, head):
        return chunked_cross_entropy(hidden, head, targets, weights, chunk_size=chunk_size, z_loss=1e-4).total

    def dense(hidden, head):
        logits = hidden @ head
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - target_logits).sum()

    gradients = [jax.value_and_grad(function, argnums=(0, 1)) for function in (chunked, dense)]
    assert largest_array(gradients[0], hidden, head) == chunk_size * vocab_size
    assert largest_array(gradients[1], hidden, head) >= length * vocab_size


def relative_error(actual, expected) -> float:
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("dtype", "by_exponentials"),
    [("bfloat16", False), ("float64", False), pytest.param("bfloat16", True, marks=pytest.mark.jax_0_11)],
)
def test_the_loss_is_traced_under_x64_and_strict_promotion(float64, dtype, by_exponentials):
    exp_logits = ExpLogits(Target.of(), interpret=True) if by_exponentials else None

    def total(*arrays):
        return chunked_cross_entropy(*arrays, chunk_size=8, z_loss=1e-3, logits_soft_cap=30.0, exp_logits=exp_logits)[0]

    shapes, dtypes = [(2, 20, 64), (64, 128), (2, 20), (2, 20)], [dtype, "float32", "int32", "float32"]
    with jax.numpy_dtype_promotion("strict"):
        gradients = jax.eval_shape(jax.grad(total, argnums=(0, 1)), *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert [x.dtype for x in gradients] == dtypes[:2]
