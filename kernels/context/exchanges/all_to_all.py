"""All-to-all: one collective gives every rank all tokens of some heads, and another one brings the output home.

The kernels see whole sequences, as on one device. Every rank does the same work, whatever the documents.

- Before the custom gradient: queries, keys and values are brought. The backward pass has them, and brings them no
  second time.
- Forward: the output returns to the ranks of its tokens. Backward: the output's gradient and delta are brought.
- Home: JAX's transpose of the bringing returns dQ, dK and dV.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Dimensions: B batch, t tokens of a rank, T of a sequence, N and K heads, n and k of them on a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.rank import Rank
from kernels.context.split import SequenceOrder, Split


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Heads have to divide, and to share one mask."""
    if call.mask.num_heads is not None:
        return "gives each rank other heads, which can't have masks of their own; use one mask for all heads"
    if call.num_heads % split.num_ranks:
        return f"gives each rank as many query heads, and {call.num_heads} don't divide by {split.num_ranks} ranks"
    if call.num_kv_heads % split.num_ranks and split.num_ranks % call.num_kv_heads:
        return (
            f"gives each rank as many key/value heads, and neither do {call.num_kv_heads} divide by "
            f"{split.num_ranks} ranks nor the ranks by them"
        )
    return None


def kernel_call(call: AttentionCall, split: Split) -> AttentionCall:
    """Whole sequences of a rank's share of the heads."""
    return call._replace(
        q_len=split.length,
        kv_len=split.length,
        num_heads=call.num_heads // split.num_ranks,
        num_kv_heads=max(1, call.num_kv_heads // split.num_ranks),
    )


def bring(rank: Rank) -> Callable[[AttentionInputs], AttentionInputs]:
    """Brings whole sequences of this rank's heads; differentiable."""

    def bring_heads(inputs: AttentionInputs) -> AttentionInputs:
        order = rank.split.sequence_order(inputs)
        ids, positions = (
            None if x is None else order.gather(x) for x in (inputs.query_segment_ids, inputs.query_positions)
        )
        return AttentionInputs(
            _to_heads(inputs.query, order),
            _to_heads(_copied(inputs.key, rank), order),
            _to_heads(_copied(inputs.value, rank), order),
            None if inputs.sinks is None else _own_heads(inputs.sinks, rank),
            ids,
            ids,
            positions,
            positions,
            inputs.token_order,
            bounds=jax.tree.map(order.gather, inputs.bounds),
        )

    return bring_heads


def fwd(inputs: AttentionInputs, rank: Rank) -> tuple[Array, Array]:
    """Output of this rank's tokens, and lse of its heads, which stays here."""
    output, lse = rank.fwd(inputs)
    return _to_tokens(output, rank.split.sequence_order(inputs)), lse


def cotangent(
    inputs: AttentionInputs, rank: Rank, output: Array, lse: Array, d_output: Array, d_lse: Array
) -> Cotangent:
    """The cotangent of this rank's heads; `output` and `d_output` are of its tokens."""
    order = rank.split.sequence_order(inputs)
    delta = (output.astype(lse.dtype) * d_output.astype(lse.dtype)).sum(-1)
    delta = _to_heads(delta, order) - jnp.where(lse != -jnp.inf, d_lse, 0)
    return Cotangent(_to_heads(d_output, order), lse, delta)


def bwd(inputs: AttentionInputs, rank: Rank, cotangent: Cotangent) -> Gradients:
    """Gradients of whole sequences of this rank's heads."""
    return rank.bwd(inputs, cotangent)


def _own_heads(sinks: Shaped[Array, " N"], rank: Rank) -> Shaped[Array, " n"]:
    num_heads = rank.call.num_heads // rank.split.num_ranks
    return lax.dynamic_slice_in_dim(sinks, lax.axis_index(rank.split.axis) * num_heads, num_heads)


def _to_heads(x: Shaped[Array, "B t N ..."], order: SequenceOrder) -> Shaped[Array, "B T n ..."]:
    return order.sort(lax.all_to_all(x, order.split.axis, split_axis=2, concat_axis=1, tiled=True))


def _to_tokens(x: Shaped[Array, "B T n ..."], order: SequenceOrder) -> Shaped[Array, "B t N ..."]:
    return lax.all_to_all(order.unsort(x), order.split.axis, split_axis=1, concat_axis=2, tiled=True)


def _copied(x: Shaped[Array, "B t K ..."], rank: Rank) -> Shaped[Array, "B t K*copies ..."]:
    """Fewer heads than ranks: several ranks get the same one. The sum of their gradients is the softmax's dtype."""
    num_copies = max(1, rank.split.num_ranks // rank.call.num_kv_heads)
    if num_copies == 1:
        return x
    return jnp.repeat(x.astype(rank.call.softmax_dtype), num_copies, axis=2).astype(x.dtype)
