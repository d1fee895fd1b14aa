"""Cross-entropy over the vocabulary without [tokens, vocabulary] logits, forward or backward.

The head's matmul, the softmax and both gradients are computed a chunk of tokens at a time. The loss is a scalar, so a
chunk's logits already determine its gradients up to one factor. The forward pass under differentiation computes them at
once, and the backward pass only scales them. That takes three matmuls with the head; recomputing the logits would take
four.

On a mesh this runs in `jax.shard_map`: each device goes through its own tokens, so that no chunk cuts across a sharded
dim, and has its own slice of the vocabulary (as Megatron-LM does, arXiv:1909.08053).

Shapes: B batch, T sequence, D width, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from trainer.step.sharding import BATCH_AXES


class CrossEntropy(NamedTuple):
    """Sums over the tokens that the mask leaves in. Only `total` carries a gradient."""

    total: Float[Array, ""]
    """nats + z, what training minimises (after division by a number of targets)."""
    nats: Float[Array, ""]
    """Negative log-likelihood of the targets."""
    z: Float[Array, ""]
    """z_loss × the squared log-partition (PaLM, arXiv:2204.02311)."""
    num_targets: Int[Array, ""]
    """Tokens counted."""


def chunked_cross_entropy(
    hidden: Float[Array, "B T D"],
    head_kernel: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    target_mask: Bool[Array, "B T"],
    *,
    chunk_size: int,
    z_loss: float,
    mesh: Mesh | None = None,
) -> CrossEntropy:
    """Masked cross-entropy and z-loss, summed over tokens.

    Matmuls take `hidden`'s dtype and accumulate in float32; the softmax, the sums and the head's gradient
    are float32.

    Args:
      hidden: final activations.
      head_kernel: the vocabulary's output vectors, usually float32.
      targets: the token ids to predict, in [0, V).
      target_mask: False where there is nothing to predict (padding).
      chunk_size: most tokens per device whose logits exist at one time.
      z_loss: weight of the squared log-partition.
      mesh: from `trainer.step.sharding.make_mesh`. Splits B over data and fsdp, T over context, V over tensor
        and, at rest, D over fsdp. None: one device.

    Returns:
      The sums, over all devices.

    >>> loss = chunked_cross_entropy(jnp.zeros((1, 3, 8)), jnp.zeros((8, 4)), jnp.array([[0, 1, 2]]),
    ...                              jnp.array([[True, True, False]]), chunk_size=2, z_loss=0.0)
    >>> round(float(loss.nats), 4), int(loss.num_targets)  # 2 log 4
    (2.7726, 2)
    """
    options = _Options(chunk_size, z_loss, mesh)
    loss = _cross_entropy(options, hidden, head_kernel, targets, target_mask)
    return CrossEntropy(loss.total, *map(lax.stop_gradient, loss[1:]))


class _Options(NamedTuple):
    chunk_size: int
    z_loss: float
    mesh: Mesh | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options: _Options, hidden, head_kernel, targets, target_mask) -> CrossEntropy:
    return _sweep(options, hidden, head_kernel, targets, target_mask, with_gradients=False)[0]


def _forward(options: _Options, hidden, head_kernel, targets, target_mask):
    loss, (d_hidden, d_head) = _sweep(options, hidden, head_kernel, targets, target_mask, with_gradients=True)
    return loss, (d_hidden, d_head.astype(head_kernel.dtype))


def _backward(options: _Options, gradients, cotangents: CrossEntropy):
    d_hidden, d_head = ((cotangents.total * gradient).astype(gradient.dtype) for gradient in gradients)
    return d_hidden, d_head, None, None


_cross_entropy.defvjp(_forward, _backward)


def _sweep(options: _Options, hidden, head_kernel, targets, target_mask, *, with_gradients: bool):
    """The loss and, if asked for, the gradients of its total; on one device or over a mesh."""
    # Cast before the head is gathered over fsdp, so that the gather moves the compute dtype.
    arrays = (hidden, head_kernel.astype(hidden.dtype), targets, target_mask)
    sweep = functools.partial(_sweep_shard, options=options, with_gradients=with_gradients)
    if options.mesh is None:
        return sweep(*arrays)
    tokens, head = P(BATCH_AXES, "context"), P("fsdp", "tensor")
    return jax.shard_map(
        sweep,
        mesh=options.mesh,
        in_specs=(tokens, head, tokens, tokens),
        out_specs=(P(), (tokens, head) if with_gradients else None),
        check_vma=False,  # the gradients are written by hand, so JAX need not know what varies over which axis
    )(*arrays)


def _sweep_shard(hidden, head, targets, target_mask, *, options: _Options, with_gradients: bool):
    sharded = options.mesh is not None
    token_axes = (*BATCH_AXES, "context") if sharded else ()
    vocab_axis = ("tensor",) if sharded else ()
    if sharded:
        head = lax.all_gather(head, "fsdp", axis=0, tiled=True)
    vocab_size, sum_dtype = head.shape[1], jnp.promote_types(hidden.dtype, jnp.float32)
    first_id = lax.axis_index(vocab_axis) * vocab_size

    def sweep_chunk(d_head, chunk):
        hidden, targets, target_mask = chunk  # [C, D], [C], [C]
        logits = jnp.dot(hidden, head, preferred_element_type=sum_dtype)
        own_highest, exp_sum = _highest_and_exp_sum(logits)
        highest = lax.pmax(own_highest, vocab_axis)
        exp_sum = lax.psum(exp_sum * jnp.exp(own_highest - highest), vocab_axis)
        log_partition = highest + jnp.log(exp_sum)  # [C]
        # The target's logit lies in one device's slice of the vocabulary.
        own_targets = targets - first_id
        is_own = (own_targets >= 0) & (own_targets < vocab_size)
        target_logits = jnp.take_along_axis(logits, jnp.where(is_own, own_targets, 0)[:, None], axis=-1)[:, 0]
        target_logits = lax.psum(jnp.where(is_own, target_logits, 0.0), vocab_axis)
        nats = jnp.where(target_mask, log_partition - target_logits, 0.0).sum()
        z = options.z_loss * jnp.where(target_mask, jnp.square(log_partition), 0.0).sum()
        if not with_gradients:
            return d_head, ((nats, z), None)
        log_partition = log_partition[:, None]
        probabilities = jnp.exp(logits - log_partition)
        is_target = own_targets[:, None] == jnp.arange(vocab_size)
        d_logits = probabilities * (1.0 + 2.0 * options.z_loss * log_partition) - is_target
        d_logits = jnp.where(target_mask[:, None], d_logits, 0.0).astype(hidden.dtype)
        d_hidden = jnp.dot(d_logits, head.T, preferred_element_type=sum_dtype)
        d_hidden = lax.psum(d_hidden, vocab_axis).astype(hidden.dtype)
        d_head += jnp.dot(hidden.T, d_logits, preferred_element_type=sum_dtype)
        return d_head, ((nats, z), d_hidden)

    d_head = jnp.zeros(head.shape, sum_dtype) if with_gradients else None
    chunks = tuple(_into_chunks(x, options.chunk_size) for x in (hidden, targets, target_mask))
    d_head, (sums, d_hidden) = lax.scan(sweep_chunk, d_head, chunks)

    nats, z = (lax.psum(x.sum(), token_axes) for x in sums)
    num_targets = lax.psum(target_mask.sum(dtype=jnp.int32), token_axes)
    loss = CrossEntropy(nats + z, nats, z, num_targets)
    if not with_gradients:
        return loss, None
    if sharded:
        d_head = lax.psum_scatter(d_head, "fsdp", scatter_dimension=0, tiled=True)
        d_head = lax.psum(d_head, ("data", "context"))
    num_tokens = targets.size
    return loss, (d_hidden.reshape(-1, hidden.shape[-1])[:num_tokens].reshape(hidden.shape), d_head)


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


def _into_chunks(x: Array, chunk_size: int) -> Any:
    """[B, T, …] → [chunks, C, …], C the least that needs no more chunks; the last is padded with zeros."""
    num_tokens = x.shape[0] * x.shape[1]
    num_chunks = -(-num_tokens // chunk_size)
    length = -(-num_tokens // num_chunks)
    flat = x.reshape(num_tokens, *x.shape[2:])
    padding = [(0, num_chunks * length - num_tokens)] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, padding).reshape(num_chunks, length, *flat.shape[1:])
