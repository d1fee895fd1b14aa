"""All-gather: every rank gathers the keys and values that any rank needs, and attends from its own queries to them.

Documents and windows bound the keys that are needed (`needed.py`). Without them a rank needs all keys.

- Before the custom gradient: nothing is brought.
- Forward and backward: keys and values are gathered.
- Home: dK and dV come by a reduce-scatter.

Source: Llama 3's context parallelism (arXiv:2407.21783).

Dimensions: B batch, t tokens of a rank, T of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.exchanges.needed import NeededChunks, can_leave_any
from kernels.context.rank import Rank
from kernels.context.split import SequenceOrder, Split


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Serves every call."""
    return None


def kernel_call(call: AttentionCall, split: Split) -> AttentionCall:
    """A rank's own queries, whose token order the kernel learns at run time, and the keys of whole sequences."""
    position_run = 1 if call.has_positions else split.run_length
    return call._replace(kv_len=split.length, has_query_positions=True, position_run=position_run)


def bring(rank: Rank) -> None:
    """Brings nothing."""


def fwd(inputs: AttentionInputs, rank: Rank) -> tuple[Array, Array]:
    """Output and lse of this rank's queries."""
    return rank.fwd(_Keys.of(inputs, rank).gathered(inputs))


def bwd(inputs: AttentionInputs, rank: Rank, cotangent: Cotangent) -> Gradients:
    """Gradients of this rank's queries, keys and values."""
    keys = _Keys.of(inputs, rank)
    d_query, d_key, d_value = rank.bwd(keys.gathered(inputs), cotangent)
    d_key, d_value = (d.astype(rank.call.dtype) for d in keys.sum_to_owners((d_key, d_value)))
    return d_query, d_key, d_value


class _Keys(NamedTuple):
    """The keys that a rank gathers.

    Attributes:
      rank: the rank.
      order: of the tokens.
      needed: the chunks that are sent; None: all are.
    """

    rank: Rank
    order: SequenceOrder
    needed: NeededChunks | None

    @staticmethod
    def of(inputs: AttentionInputs, rank: Rank) -> _Keys:
        """The keys of a call of one rank. Only the tokens' integers are read."""
        call, split = rank.call, rank.split
        order = split.sequence_order(inputs)
        if not can_leave_any(call, split):
            return _Keys(rank, order, None)
        chunks = split.chunks(order, call.batch)
        return _Keys(rank, order, NeededChunks(call, split, chunks, inputs.query_segment_ids))

    def gathered(self, inputs: AttentionInputs) -> AttentionInputs:
        """The kernel's inputs."""
        arrays = (inputs.key, inputs.value)
        key, value = map(self.order.gather, arrays) if self.needed is None else self.needed.gather(arrays)
        positions, ids, bounds = inputs.query_positions, inputs.query_segment_ids, inputs.bounds
        if bounds is not None:
            # The keys are whole sequences, in their order.
            queries = self.rank.split.spans(inputs)
            bounds = bounds.map(lambda k: k, lambda q: queries.num_before(self.order.gather(q)))
        return AttentionInputs(
            inputs.query,
            key,
            value,
            inputs.sinks,
            ids,
            None if ids is None else self.order.gather(ids),
            self.rank.split.token_order(inputs) if positions is None else positions,
            arange_like(key) if positions is None else self.order.gather(positions),
            bounds=bounds,
        )

    def sum_to_owners(self, arrays: tuple[Shaped[Array, "B T ..."], ...]) -> tuple[Shaped[Array, "B t ..."], ...]:
        """The transpose of the gather, in the softmax's dtype: the sum over the ranks that read a key."""
        if self.needed is not None:
            return self.needed.sum_to_owners(arrays)
        dtype = self.rank.call.softmax_dtype
        return tuple(self.rank.split.sum_to_owners(self.order.unsort(x.astype(dtype))) for x in arrays)


def arange_like(key: Shaped[Array, "B S ..."]) -> Int[Array, "B S"]:
    """Positions of keys that count from 0."""
    return jnp.broadcast_to(jnp.arange(key.shape[1], dtype=jnp.int32), key.shape[:2])
