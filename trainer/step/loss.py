"""Cross-entropy over the vocabulary without [tokens, vocabulary] logits, forward or backward.

The head's matmul, the softmax and both gradients are computed a chunk of tokens at a time. The loss is a scalar, so a
chunk's logits already determine its gradients up to one factor. The forward pass under differentiation computes them at
once, and the backward pass only scales them. That takes three matmuls with the head; recomputing the logits would take
four.

Where `kernels.loss.exp_logits` serves, no logits are stored under differentiation. A token's exponentials are relative
to its target's: their sum is the exponential of its loss. One factor a token, known once the sum
is, makes probabilities of them, with the token's weight; the token's rows of the later matmuls are multiplied by the
factor instead. If float32 can't hold a sum, everything is computed once more, from logits.

On a mesh each device goes through its own tokens, so that no chunk cuts across a sharded dim. The ranks of `tensor`,
which have the same tokens and each a slice of the vocabulary, share the tokens out: the head is gathered once, its
gradient is reduce-scattered once, and nothing is sent within the loop over chunks. The vocabulary could stay split
instead (Megatron-LM, arXiv:1909.08053), but then a token's gradients wait for the softmax of all ranks: in every chunk,
or until a second sweep, which computes the logits again. With tens of thousands of tokens to a device, that fourth
matmul takes longer than to send the head.

Shapes: B batch, T sequence, N tokens of the device, D width, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels.loss.exp_logits import ExpLogits
from kernels.tracing.number_types import at_least_float32

# Beyond it, hidden states times what the exponentials are multiplied by would be lost. It is a loss of 69 nats.
_HIGHEST_SUM = 1e30
# Of what z-loss multiplies probabilities by. The target's exponential is divided by it.
_LEAST_Z_FACTOR = 0.5


class CrossEntropy(NamedTuple):
    """Sums over the targets whose weight isn't 0. Only `total` carries a gradient."""

    total: Float[Array, ""]
    """nats + z. Training minimises the total of a step over its `weight_sum`."""
    nats: Float[Array, ""]
    """Negative log-likelihood of the targets, times their weights."""
    z: Float[Array, ""]
    """z_loss × the squared log-partition (PaLM, arXiv:2204.02311), times the weights' absolute values."""
    weight_sum: Float[Array, ""]
    """Sum of the weights' absolute values, which divides a mean. Weights of both signs may sum to nothing."""
    num_targets: Int[Array, ""]
    """Targets counted, each once, whatever its weight."""
    num_recomputed: Int[Array, ""]
    """Devices whose exponentials didn't serve, so that the loss of their tokens was computed again, from logits."""


def chunked_cross_entropy(
    hidden: Float[Array, "B T D"],
    head_kernel: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk_size: int,
    z_loss: float,
    logits_soft_cap: float | None = None,
    shared_over: str | None = None,
    exp_logits: ExpLogits | None = None,
) -> CrossEntropy:
    """Weighted cross-entropy and z-loss, summed over tokens.

    Matmuls take `hidden`'s dtype and accumulate in float32; the softmax, the sums and the head's gradient
    are float32. With float64 activations all are float64.

    Args:
      hidden: final activations.
      head_kernel: the vocabulary's output vectors, usually float32.
      targets: the token ids to predict, in [0, V).
      weights: by which the losses of targets are multiplied, negative ones too; the z-loss by their absolute values, as
        it is a penalty whatever is learned. 0 where there is nothing to learn (padding): no such token's loss enters,
        not even a NaN. They have no gradient.
      chunk_size: most tokens per device whose logits exist at one time.
      z_loss: weight of the squared log-partition.
      logits_soft_cap: logits become cap * tanh(logits / cap); None: as they are.
      shared_over: mesh axis, of type Auto in the context's mesh, whose devices all have these tokens and share the
        work on them. None: this device does it all.
      exp_logits: computes exponentials of logits where there are gradients; a device and a head that it serves. None:
        XLA computes logits.

    Returns:
      The sums over these tokens.

    >>> loss = chunked_cross_entropy(jnp.zeros((1, 3, 8)), jnp.zeros((8, 4)), jnp.array([[0, 1, 2]]),
    ...                              jnp.array([[1.0, 0.5, 0.0]]), chunk_size=2, z_loss=0.0)
    >>> round(float(loss.nats), 4), float(loss.weight_sum), int(loss.num_targets)  # 1.5 log 4
    (2.0794, 1.5, 2)
    """
    options = _Options(chunk_size, z_loss, logits_soft_cap, shared_over, exp_logits)
    loss = _cross_entropy(options, hidden, head_kernel, targets, weights)
    return CrossEntropy(loss.total, *map(lax.stop_gradient, loss[1:]))


def sum_weights(weights: Float[Array, "B T"], dtype: jnp.dtype) -> Float[Array, ""]:
    """The sum of the weights' absolute values, as `CrossEntropy.weight_sum` has it.

    Args:
      weights: of targets.
      dtype: that they are summed in: the loss's own, so that float64 losses have float64 means.
    """
    return jnp.abs(weights.astype(dtype)).sum()


def divide_by_weights(total: Float[Array, ""], weight_sum: Float[Array, ""]) -> Float[Array, ""]:
    """A mean over targets: a sum over them, divided by that of their weights; 0 where all weights are 0.

    >>> zero = jnp.array(0.0)
    >>> float(divide_by_weights(jnp.array(3.0), jnp.array(2.0))), float(divide_by_weights(zero, zero))
    (1.5, 0.0)
    """
    return total / jnp.where(weight_sum > 0, weight_sum, 1)


class TokenLosses(NamedTuple):
    """What a model makes of each target."""

    nats: Float[Array, "B T"]
    """Negative log-likelihood."""
    is_likeliest: Bool[Array, "B T"]
    """True where the target has the highest logit, or is the first of those that have."""


def token_losses(
    hidden: Float[Array, "B T D"],
    head_kernel: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    chunk_size: int,
    logits_soft_cap: float | None = None,
) -> TokenLosses:
    """The cross-entropy of each token, whose logits exist a chunk of tokens at a time; not to be differentiated.

    Args:
      hidden, head_kernel, targets, chunk_size, logits_soft_cap: as in `chunked_cross_entropy`.

    >>> losses = token_losses(jnp.zeros((1, 3, 8)), jnp.zeros((8, 4)), jnp.array([[0, 1, 2]]), chunk_size=2)
    >>> losses.is_likeliest.tolist()
    [[True, False, False]]
    """
    head = head_kernel.astype(hidden.dtype)

    def of_chunk(_, chunk):
        hidden, targets = chunk  # [C, D], [C]
        logits = _capped_logits(hidden, head, logits_soft_cap, _sum_dtype(head_kernel))
        highest, exp_sum = _highest_and_exp_sum(logits)
        nats = highest + jnp.log(exp_sum) - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return None, TokenLosses(nats, logits.argmax(-1) == targets)

    _, losses = lax.scan(of_chunk, None, _into_chunks((hidden, targets), chunk_size))
    return jax.tree.map(lambda x: x.reshape(-1)[: targets.size].reshape(targets.shape), losses)


class _Options(NamedTuple):
    chunk_size: int
    z_loss: float
    logits_soft_cap: float | None
    shared_over: str | None
    exp_logits: ExpLogits | None
    head_trains: bool = True
    """False: nobody asks for the gradient of the head, which is frozen."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options: _Options, hidden, head_kernel, targets, weights) -> CrossEntropy:
    return _sweep(options, _Tokens(hidden, targets, weights), head_kernel, with_gradients=False)[0]


def _forward(options: _Options, *arguments):
    options = options._replace(head_trains=arguments[1].perturbed)
    hidden, head_kernel, *of_targets = jax.tree.map(lambda argument: argument.value, arguments)
    tokens = _Tokens(hidden, *of_targets)
    loss, (d_hidden, d_head) = _sweep(options, tokens, head_kernel, with_gradients=True)
    return loss, (d_hidden, None if d_head is None else d_head.astype(head_kernel.dtype))


def _backward(options: _Options, gradients, cotangents: CrossEntropy):
    def scaled(gradient: Array) -> Array:
        dtype = np.promote_types(gradient.dtype, cotangents.total.dtype)
        return (cotangents.total.astype(dtype) * gradient.astype(dtype)).astype(gradient.dtype)

    return (*jax.tree.map(scaled, gradients), None, None)


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _sweep(options: _Options, tokens: _Tokens, head_kernel: Float[Array, "D V"], *, with_gradients: bool):
    """The loss and, if asked for, the gradients of its total; by one device or shared."""
    # Cast before the head is gathered, so that the gather moves the compute dtype.
    head = head_kernel.astype(tokens.hidden.dtype)
    sweep = functools.partial(_sweep_tokens, options=options, with_gradients=with_gradients)
    if (axis := options.shared_over) is None:
        return sweep(tokens, head)

    def sweep_share(tokens, head):
        loss, gradients = sweep(tokens, head)
        loss = lax.psum(loss, axis)
        if gradients is None:
            return loss, None
        d_hidden, d_head = gradients
        if d_head is not None:
            d_head = lax.psum_scatter(d_head, axis, scatter_dimension=1, tiled=True)
        return loss, (d_hidden, d_head)

    length, num_devices = tokens.hidden.shape[1], jax.sharding.get_abstract_mesh().shape[axis]
    of_tokens = P(None, axis)
    shared = jax.shard_map(
        sweep_share,
        in_specs=(of_tokens, P()),
        out_specs=(P(), (of_tokens, P(None, axis)) if with_gradients else None),
        axis_names={axis},
        check_vma=False,  # the gradients are written by hand, so JAX need not know what varies over which axis
    )
    loss, gradients = shared(jax.tree.map(lambda x: _pad_tokens(x, -length % num_devices), tokens), head)
    if gradients is None:
        return loss, None
    d_hidden, d_head = gradients
    return loss, (d_hidden[:, :length], d_head)


def _pad_tokens(x: Shaped[Array, "B T ..."], num_tokens: int) -> Shaped[Array, "B T+n ..."]:
    return jnp.pad(x, [(0, 0), (0, num_tokens)] + [(0, 0)] * (x.ndim - 2))


class _Tokens(NamedTuple):
    """A device's tokens."""

    hidden: Float[Array, "B T D"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]


def _sweep_tokens(tokens: _Tokens, head: Float[Array, "D V"], *, options: _Options, with_gradients: bool):
    """The loss and the gradients of a device's tokens."""
    if not with_gradients or options.exp_logits is None:
        return _sweep_by_logits(tokens, head, options, with_gradients=with_gradients)
    swept, is_held = _sweep_by_exponentials(tokens, head, options, options.exp_logits)
    # Logits in float32 and their gradient take three times the memory of exponentials.
    by_logits = options._replace(chunk_size=-(-options.chunk_size // 3))

    def recompute():
        loss, gradients = _sweep_by_logits(tokens, head, by_logits, with_gradients=True)
        return loss._replace(num_recomputed=jnp.int32(1)), gradients

    return lax.cond(is_held, lambda: swept, recompute)


def _sweep_by_logits(tokens: _Tokens, head: Float[Array, "D V"], options: _Options, *, with_gradients: bool):
    """The loss and the gradients, by logits."""
    sum_dtype, cap = _sum_dtype(head), options.logits_soft_cap

    def sweep_chunk(d_head, chunk):
        hidden, targets, weights = chunk  # [C, D], [C], [C]
        logits = _capped_logits(hidden, head, cap, sum_dtype)
        highest, exp_sum = _highest_and_exp_sum(logits)
        log_partition = highest + jnp.log(exp_sum)  # [C]
        target_logits = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        weights = weights.astype(sum_dtype)
        sums = _sum_up(log_partition - target_logits, log_partition, weights, options)
        if not with_gradients:
            return d_head, (sums, None)
        is_target = targets[:, None] == jnp.arange(head.shape[1], dtype=targets.dtype)
        # The weight is a factor of terms of a token, [C], so that it costs nothing of [C, V].
        scales, weights = (weights * _z_factor(log_partition, weights, options))[:, None], weights[:, None]
        d_logits = scales * jnp.exp(logits - log_partition[:, None]) - jnp.where(is_target, weights, 0.0)
        if cap is not None:
            d_logits *= 1.0 - jnp.square(logits / cap)
        d_logits = jnp.where(weights != 0, d_logits, 0.0).astype(hidden.dtype)
        d_hidden = jnp.dot(d_logits, head.T, preferred_element_type=sum_dtype).astype(hidden.dtype)
        if d_head is not None:
            d_head += jnp.dot(hidden.T, d_logits, preferred_element_type=sum_dtype)
        return d_head, (sums, d_hidden)

    d_head = jnp.zeros(head.shape, sum_dtype) if with_gradients and options.head_trains else None
    d_head, (sums, d_hidden) = lax.scan(sweep_chunk, d_head, _into_chunks(tokens, options.chunk_size))
    loss = _join_sums(sums, tokens)
    return loss, (_join_chunks(d_hidden, tokens), d_head) if with_gradients else None


def _sweep_by_exponentials(
    tokens: _Tokens, head: Float[Array, "D V"], options: _Options, exp_logits: ExpLogits
) -> tuple[tuple[CrossEntropy, tuple[Array, Array | None]], Bool[Array, ""]]:
    """The loss and the gradients by exponentials, and whether they hold: no sum and no z-loss is too large for it."""
    sum_dtype, cap = _sum_dtype(head), options.logits_soft_cap
    target_logits = jnp.einsum("btd,btd->bt", tokens.hidden, head.T[tokens.targets], preferred_element_type=sum_dtype)
    target_slopes = jnp.ones_like(target_logits)
    if cap is not None:
        capped = jnp.tanh(target_logits / cap)
        target_logits, target_slopes = cap * capped, 1.0 - jnp.square(capped)

    def sweep_chunk(d_head, chunk):
        (hidden, targets, weights), target_logits, target_slopes = chunk
        weights = weights.astype(sum_dtype)
        is_counted = weights != 0
        exponentials, exp_sum = exp_logits(hidden, head, target_logits, soft_cap=cap)
        nats = jnp.log(exp_sum)
        log_partition = target_logits + nats
        # The gradient is z_factor * exponential / exp_sum, and 1 less at the target, whose exponential is 1.
        z_factor = _z_factor(log_partition, weights, options)
        factors = jnp.where(is_counted, weights * z_factor / exp_sum, 0.0)[:, None]
        at_targets = target_slopes * (1.0 - exp_sum / z_factor)
        terms = exponentials.at[jnp.arange(targets.size), targets].set(at_targets.astype(exponentials.dtype))
        d_hidden = (factors * jnp.dot(terms, head.T, preferred_element_type=sum_dtype)).astype(hidden.dtype)
        if d_head is not None:
            d_head += jnp.dot(
                (factors * hidden.astype(sum_dtype)).astype(hidden.dtype).T, terms, preferred_element_type=sum_dtype
            )
        # Of all tokens: infinite exponentials of one whose weight is 0, times 0, aren't 0. A NaN isn't held.
        highest_sum = _HIGHEST_SUM * jnp.where(is_counted, jnp.minimum(jnp.abs(weights), 1.0), 1.0)
        is_held = (exp_sum < highest_sum) & (z_factor > _LEAST_Z_FACTOR)
        sums = _sum_up(nats, log_partition, weights, options)
        return d_head, (sums, d_hidden, is_held.all())

    chunks = _into_chunks((tokens, target_logits, target_slopes), options.chunk_size)
    d_head = jnp.zeros(head.shape, sum_dtype) if options.head_trains else None
    d_head, (sums, d_hidden, is_held) = lax.scan(sweep_chunk, d_head, chunks)
    return (_join_sums(sums, tokens), (_join_chunks(d_hidden, tokens), d_head)), is_held.all()


def _sum_dtype(head: Array) -> jnp.dtype:
    return at_least_float32(head.dtype)


def _capped_logits(
    hidden: Float[Array, "C D"], head: Float[Array, "D V"], cap: float | None, sum_dtype: jnp.dtype
) -> Float[Array, "C V"]:
    logits = jnp.dot(hidden, head, preferred_element_type=sum_dtype)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _sum_up(
    nats: Float[Array, " C"],
    log_partition: Float[Array, " C"],
    weights: Float[Array, " C"],
    options: _Options,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A chunk's nats and z. A token without a weight may have infinite terms."""
    z = options.z_loss * jnp.where(weights != 0, jnp.abs(weights) * jnp.square(log_partition), 0.0).sum()
    return jnp.where(weights != 0, weights * nats, 0.0).sum(), z


def _z_factor(log_partition: Float[Array, " C"], weights: Float[Array, " C"], options: _Options) -> Float[Array, " C"]:
    """By which z-loss multiplies the probabilities in a token's gradient, before the weight multiplies all of it."""
    return 1.0 + 2.0 * options.z_loss * jnp.sign(weights) * log_partition


def _join_sums(sums: tuple[Float[Array, " chunks"], Float[Array, " chunks"]], tokens: _Tokens) -> CrossEntropy:
    nats, z = (x.sum() for x in sums)
    num_targets = (tokens.weights != 0).sum(dtype=jnp.int32)
    return CrossEntropy(nats + z, nats, z, sum_weights(tokens.weights, nats.dtype), num_targets, jnp.int32(0))


def _highest_and_exp_sum(logits: Float[Array, "C V"]) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
    """The highest logit of each token, and the sum of its exp(logit - highest), in one pass over the logits.

    The sum is carried along with the highest so far, as in Milakov and Gimelshein, arXiv:1805.02867.
    """

    def combine(one, other):
        (highest, exp_sum), (other_highest, other_exp_sum) = one, other
        is_higher = highest >= other_highest
        factor = jnp.exp(-jnp.abs(highest - other_highest))
        exp_sum = jnp.where(is_higher, exp_sum + other_exp_sum * factor, exp_sum * factor + other_exp_sum)
        return jnp.where(is_higher, highest, other_highest), exp_sum

    # Not -inf: its difference from itself is NaN.
    begin = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype)
    return lax.reduce((logits, jnp.ones_like(logits)), begin, combine, (1,))


def _into_chunks(arrays: Any, chunk_size: int) -> Any:
    """[B, T, …] → [chunks, C, …], C the least that needs no more chunks; the last is padded with zeros."""

    def divide(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "chunks C ..."]:
        x = x.reshape(-1, *x.shape[2:])
        num_chunks = -(-x.shape[0] // chunk_size)
        length = -(-x.shape[0] // num_chunks)
        padding = [(0, num_chunks * length - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(num_chunks, length, *x.shape[1:])

    return jax.tree.map(divide, arrays)


def _join_chunks(x: Float[Array, "chunks C D"], tokens: _Tokens) -> Float[Array, "B T D"]:
    return x.reshape(-1, x.shape[-1])[: tokens.targets.size].reshape(tokens.hidden.shape)
