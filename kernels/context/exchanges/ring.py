"""Ring: keys and values travel from rank to rank, and every rank's queries attend to those that are there.

A rank never holds more than two ranks' keys. Each hop is under way while the kernel works on what has arrived. In the
backward pass the gradients of keys and values travel with them, and a last hop takes them home.

XLA would start all hops at once, and hold all keys at once, but for the barrier that ties a hop to the kernel's output.

Source: Ring Attention (arXiv:2310.01889).

Dimensions: B batch, t tokens of a rank, N query heads, V head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.attention.core import Halves
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.split import Split


class _TravellingKeys(NamedTuple):
    """What travels."""

    key: Array
    value: Array
    segment_ids: Int[Array, "B t"] | None
    positions: Int[Array, "B t"]


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Serves every call."""
    return None


def local_call(call: AttentionCall, split: Split) -> AttentionCall:
    """What a rank's kernel is called for, once for each rank's keys. The sinks are added afterwards."""
    position_run = 1 if call.has_positions else split.run_length
    return call._replace(
        has_query_positions=True, has_key_value_positions=True, has_sinks=False, position_run=position_run
    )


class Ring:
    """One rank's part.

    Args:
      inputs: what the rank holds.
      call: of one rank.
      split: of the rows.
    """

    def __init__(self, inputs: AttentionInputs, call: AttentionCall, split: Split):
        self.split, self.num_hops = split, num_hops(call, split)
        positions = split.places(inputs) if inputs.query_positions is None else inputs.query_positions
        self.own = _TravellingKeys(inputs.key, inputs.value, inputs.query_segment_ids, positions)

    def forward(
        self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves
    ) -> tuple[Float[Array, "B t N V"], Float[Array, "B t N"]]:
        """Output and lse of this rank's queries."""
        keys, merged = self.own, None
        for hop in range(self.num_hops):
            following = self._to_next(keys) if hop + 1 < self.num_hops else keys
            output, lse = halves.forward(self._inputs(inputs, keys), local_call, halves.tuning)
            part = output.astype(lse.dtype), lse
            merged = part if merged is None else merge(merged, part)
            keys, merged = lax.optimization_barrier((following, merged))
        assert merged is not None, "there is a hop at least"
        output, lse = merged if inputs.sinks is None else add_sinks(merged, inputs.sinks)
        return output.astype(local_call.dtype), lse

    def backward(
        self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves, cotangent: Cotangent
    ) -> Gradients:
        """Gradients of this rank's queries, keys and values, summed in the softmax's dtype."""
        dtype = local_call.softmax_dtype
        keys, d_query, of_keys = self.own, jnp.zeros(inputs.query.shape, dtype), None
        for hop in range(self.num_hops):
            following = self._to_next(keys) if hop + 1 < self.num_hops else keys
            parts = halves.backward(self._inputs(inputs, keys), local_call, halves.tuning, cotangent)
            d_query += parts[0].astype(dtype)
            # The sum so far was sent on when the last hop's was done: it travels while this hop's is made.
            arrived = None if of_keys is None else self._to_next(of_keys)
            own = tuple(part.astype(dtype) for part in parts[1:])
            of_keys = own if arrived is None else jax.tree.map(jnp.add, arrived, own)
            keys, d_query, of_keys = lax.optimization_barrier((following, d_query, of_keys))
        d_key, d_value = self._shift(of_keys, 1 - self.num_hops)
        return d_query.astype(local_call.dtype), d_key.astype(local_call.dtype), d_value.astype(local_call.dtype)

    def _inputs(self, inputs: AttentionInputs, keys: _TravellingKeys) -> AttentionInputs:
        return AttentionInputs(
            inputs.query,
            keys.key,
            keys.value,
            None,
            inputs.query_segment_ids,
            keys.segment_ids,
            self.own.positions,
            keys.positions,
        )

    def _to_next(self, tree):
        return self._shift(tree, 1)

    def _shift(self, tree, distance: int):
        ranks = range(self.split.num_ranks)
        moves = [(rank, (rank + distance) % self.split.num_ranks) for rank in ranks]
        return jax.tree.map(lambda x: lax.ppermute(x, self.split.axis, moves), tree)


part = Ring


def num_hops(call: AttentionCall, split: Split) -> int:
    """Ranks whose keys a rank's queries may attend to, its own among them."""
    lookback = call.mask.lookback
    if split.deal != "in_order" or call.mask.num_heads is not None or call.mask.looks_ahead or lookback is None:
        return split.num_ranks
    return min(split.num_ranks, 1 + -(-lookback // call.q_len))


def merge(
    one: tuple[Float[Array, "B t N V"], Float[Array, "B t N"]],
    other: tuple[Float[Array, "B t N V"], Float[Array, "B t N"]],
) -> tuple[Float[Array, "B t N V"], Float[Array, "B t N"]]:
    """Output and lse over two sets of keys, from those over each. NaN isn't hidden."""
    (output, lse), (other_output, other_lse) = one, other
    total = jnp.logaddexp(lse, other_lse)
    return output * _share(lse, total) + other_output * _share(other_lse, total), total


def add_sinks(
    whole: tuple[Float[Array, "B t N V"], Float[Array, "B t N"]], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "B t N V"], Float[Array, "B t N"]]:
    """Output and lse with the sinks taken into the softmax, where a row attends to anything."""
    output, lse = whole
    total = jnp.where(lse == -jnp.inf, lse, jnp.logaddexp(lse, sinks.astype(lse.dtype)))
    return output * _share(lse, total), total


def _share(lse: Float[Array, "B t N"], total: Float[Array, "B t N"]) -> Float[Array, "B t N 1"]:
    return jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - total))[..., None]
