"""Ring: keys and values travel from rank to rank, and every rank's queries attend to the keys that are there.

- Before the custom gradient: nothing is brought.
- Forward and backward: keys and values travel. A rank never holds the keys of more than two ranks. Each hop is under
  way while the kernel works on the keys of the last one. In the backward pass dK and dV travel with their keys.
- Home: dK and dV return by the shorter way.

Windows decide ahead of time how far keys have to go. Documents decide it at run time, by the ranges of their ids, where
ranks hold tokens in their order. Then the hops are a loop whose number of trips is data.

The barriers tie a hop's keys to the kernel's output. Without them XLA may start a hop before the one before it is used,
and hold more ranks' keys at once.

Source: Ring Attention (arXiv:2310.01889).

Dimensions: B batch, t tokens of a rank, N query heads, V head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.exchanges.halo import reach_by_side
from kernels.context.exchanges.needed import may_share_documents
from kernels.context.rank import Rank
from kernels.context.spans import Spans
from kernels.context.split import Split
from kernels.masks import Bounds
from kernels.tracing.mesh_axes import manual_axes

_Sums = TypeVar("_Sums", bound=tuple[Array, ...])


class _TravellingKeys(NamedTuple):
    """The keys of one rank, with their documents, positions and bounds, and where they lie in the sequence."""

    key: Array
    value: Array
    segment_ids: Int[Array, "B t"] | None
    positions: Int[Array, "B t"]
    bounds: Bounds | None
    spans: Spans | None

    @staticmethod
    def of(inputs: AttentionInputs, split: Split) -> _TravellingKeys:
        """This rank's own keys."""
        positions = split.token_order(inputs) if inputs.query_positions is None else inputs.query_positions
        bounds, spans = inputs.bounds, None
        if bounds is not None:
            bounds, spans = bounds._replace(k_start=None, k_end=None), split.spans(inputs)
        return _TravellingKeys(inputs.key, inputs.value, inputs.query_segment_ids, positions, bounds, spans)


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Serves every call."""
    return None


def kernel_call(call: AttentionCall, split: Split) -> AttentionCall:
    """A rank's own queries and the keys of one rank; the kernel is called for each. The sinks are added afterwards."""
    position_run = 1 if call.has_positions else split.run_length
    return call._replace(
        has_query_positions=True, has_key_value_positions=True, has_sinks=False, position_run=position_run
    )


def bring(rank: Rank) -> None:
    """Brings nothing."""


def fwd(inputs: AttentionInputs, rank: Rank) -> tuple[Float[Array, "B t N V"], Float[Array, "B t N"]]:
    """Output and lse of this rank's queries."""
    ring, own = Ring.of(inputs, rank), _TravellingKeys.of(inputs, rank.split)

    def attend(keys: _TravellingKeys) -> tuple[Array, Array]:
        output, lse = rank.fwd(_kernel_inputs(inputs, own, keys))
        return output.astype(lse.dtype), lse

    merged = ring.over_hops(own, attend, lambda merged, keys: merge(merged, attend(keys)))
    output, lse = merged if inputs.sinks is None else add_sinks(merged, inputs.sinks)
    return output.astype(rank.call.dtype), lse


def bwd(inputs: AttentionInputs, rank: Rank, cotangent: Cotangent) -> Gradients:
    """Gradients of this rank's queries, keys and values, summed in the softmax's dtype and rounded once."""
    ring, own, dtype = Ring.of(inputs, rank), _TravellingKeys.of(inputs, rank.split), rank.call.softmax_dtype

    def gradients(keys: _TravellingKeys) -> tuple[Array, ...]:
        return tuple(part.astype(dtype) for part in rank.bwd(_kernel_inputs(inputs, own, keys), cotangent))

    def add(summed: tuple[Array, ...], keys: _TravellingKeys) -> tuple[Array, ...]:
        # The keys' gradients so far were complete when the last hop was: they travel while this hop's are computed.
        d_query, *d_keys = summed
        return jax.tree.map(jnp.add, (d_query, *ring.to_next(d_keys)), gradients(keys))

    d_query, *d_keys = (x.astype(rank.call.dtype) for x in ring.over_hops(own, gradients, add))
    d_key, d_value = ring.home(d_keys)
    return d_query, d_key, d_value


def _kernel_inputs(inputs: AttentionInputs, own: _TravellingKeys, keys: _TravellingKeys) -> AttentionInputs:
    bounds = inputs.bounds
    if bounds is not None:
        assert keys.bounds is not None, "the bounds of keys travel with them"
        assert keys.spans is not None, "so do their spans"
        assert own.spans is not None, "the call has bounds"
        bounds = bounds._replace(q_start=keys.bounds.q_start, q_end=keys.bounds.q_end)
        bounds = bounds.map(keys.spans.num_before, own.spans.num_before)
    return AttentionInputs(
        inputs.query,
        keys.key,
        keys.value,
        None,
        inputs.query_segment_ids,
        keys.segment_ids,
        own.positions,
        keys.positions,
        bounds=bounds,
    )


class Ring(NamedTuple):
    """The way of keys from rank to rank.

    Attributes:
      split: of the sequences.
      num_hops: the number of ranks whose keys a rank's queries attend to, its own among them.
    """

    split: Split
    num_hops: int | Int[Array, ""]

    @staticmethod
    def of(inputs: AttentionInputs, rank: Rank) -> Ring:
        """The ring of a call of one rank. Only the tokens' integers are read."""
        return Ring(rank.split, needed_hops(rank.call, rank.split, inputs.query_segment_ids))

    def over_hops(
        self,
        own: _TravellingKeys,
        first: Callable[[_TravellingKeys], _Sums],
        add: Callable[[_Sums, _TravellingKeys], _Sums],
    ) -> _Sums:
        """`first` of this rank's own keys; then `add` of the sum so far and of each other rank's keys in turn."""
        is_static = isinstance(self.num_hops, int)
        if is_static and self.num_hops == 1:
            return first(own)

        # A loop, so that compile time doesn't grow with the number of ranks.
        def hop(_: Array, carried: tuple[_TravellingKeys, _Sums]) -> tuple[_TravellingKeys, _Sums]:
            keys, summed = carried
            return lax.optimization_barrier((self.to_next(keys), add(summed, keys)))

        carried = lax.optimization_barrier((self.to_next(own), first(own)))
        if not is_static or self.num_hops > 2:
            carried = lax.fori_loop(0, self.num_hops - 2, hop, carried)
        keys, summed = carried
        return add(summed, keys)

    def to_next(self, tree):
        """From each rank to the next one."""
        return self._shift(tree, 1)

    def home(self, tree):
        """Back to the ranks that it came from."""
        if isinstance(self.num_hops, int):
            return self._shift(tree, 1 - self.num_hops)
        # How far a shift goes is static, so these go rank by rank.
        back = self.num_hops - 1
        forth = self.split.num_ranks - back

        def go(step: int) -> Callable:
            def hop(_: Array, tree):
                return self._shift(tree, step)

            return lambda tree: lax.fori_loop(1, jnp.minimum(back, forth), hop, self._shift(tree, step))

        return lax.cond(back <= forth, go(-1), go(1), tree)

    def _shift(self, tree, distance: int):
        ranks = range(self.split.num_ranks)
        moves = [(rank, (rank + distance) % self.split.num_ranks) for rank in ranks]
        return jax.tree.map(lambda x: lax.ppermute(x, self.split.axis, moves), tree)


def num_hops(call: AttentionCall, split: Split) -> int:
    """Ranks whose keys a rank's queries may attend to, its own among them."""
    lookback, ahead = reach_by_side(call)
    if split.sequence_sharding != "contiguous" or call.mask.num_heads is not None or ahead != 0 or lookback is None:
        return split.num_ranks
    return min(split.num_ranks, 1 + -(-lookback // call.q_len))


def needed_hops(call: AttentionCall, split: Split, segment_ids: Int[Array, "B t"] | None) -> int | Int[Array, ""]:
    """As `num_hops`, and no more than this batch's documents need; alike on all devices.

    Args:
      call: of one rank.
      split: of the sequences.
      segment_ids: of the rank's tokens; None: one document.
    """
    most = num_hops(call, split)
    if not documents_bound_hops(call, split) or most == 2:
        return most
    assert segment_ids is not None, "the call has documents"
    ranks = jnp.arange(split.num_ranks, dtype=jnp.int32)
    hops_to = 1 + jnp.tril(ranks[:, None] - ranks)  # from the keys' rank to the queries', which isn't before it
    farthest = jnp.max(jnp.where(may_share_documents(segment_ids[:, None], split), hops_to, 1))
    # A collective is one operation of all devices, so they all go round as often. The first hop is under way before the
    # loop begins.
    return jnp.clip(lax.pmax(farthest, tuple(sorted({split.axis} | manual_axes()))), 2, most)


def documents_bound_hops(call: AttentionCall, split: Split) -> bool:
    """True if documents may end a ring early. Their ids tell, at run time.

    A rank then needs the keys of those just before it, for positions count up within a document.
    """
    return (
        call.has_segment_ids
        and split.sequence_sharding == "contiguous"
        and reach_by_side(call)[1] == 0
        and num_hops(call, split) > 1
    )


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
    """Output and lse with the sinks taken into the softmax, where a query attends to anything."""
    output, lse = whole
    total = jnp.where(lse == -jnp.inf, lse, jnp.logaddexp(lse, sinks.astype(lse.dtype)))
    total = jnp.where(total == jnp.inf, jnp.nan, total)  # a share of exp(−inf) would hide it
    return output * _share(lse, total), total


def _share(lse: Float[Array, "B t N"], total: Float[Array, "B t N"]) -> Float[Array, "B t N 1"]:
    return jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - total))[..., None]
