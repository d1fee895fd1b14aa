"""All-to-all: one gives every rank all tokens of some heads, and another one brings the output home.

The kernels see whole rows, as on one device. Every rank does the same work, whatever the documents.

Queries, keys and values are brought before the custom gradient begins: what it keeps for the backward pass is what the
kernel was given, as much as it was given, and is not brought again. JAX's transpose brings their gradients home.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Dimensions: B batch, t tokens of a rank, T of a row, N and K heads, n and k of them on a rank.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from kernels.attention.core import Halves
from kernels.call import AttentionCall, AttentionInputs, Cotangent
from kernels.context.exchanges.brought import Brought
from kernels.context.split import Split


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


def local_call(call: AttentionCall, split: Split) -> AttentionCall:
    """What a rank's kernel is called for: whole rows of its share of the heads."""
    return call._replace(
        q_len=split.length,
        kv_len=split.length,
        num_heads=call.num_heads // split.num_ranks,
        num_kv_heads=max(1, call.num_kv_heads // split.num_ranks),
    )


class AllToAll(Brought):
    """One rank's part. See `Brought`.

    Args:
      inputs: what the rank holds, before or after `bring`.
      call: of one rank.
      split: of the rows.
    """

    def __init__(self, inputs: AttentionInputs, call: AttentionCall, split: Split):
        self.call, self.split = call, split
        self.order = split.row_order(inputs)

    def bring(self, inputs: AttentionInputs, halves: Halves) -> AttentionInputs:
        """Whole rows of this rank's heads; differentiable."""
        del halves  # all take whole rows
        of_tokens = inputs.query_segment_ids, inputs.query_positions
        ids, positions = (None if x is None else self.order.gather(x) for x in of_tokens)
        return AttentionInputs(
            self._to_heads(inputs.query),
            self._to_heads(self._copied(inputs.key)),
            self._to_heads(self._copied(inputs.value)),
            None if inputs.sinks is None else self._own_heads(inputs.sinks),
            ids,
            ids,
            positions,
            positions,
            inputs.token_order,
        )

    def forward(self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves) -> tuple[Array, Array]:
        """Output of this rank's tokens, and lse of its heads, which stays here."""
        output, lse = super().forward(inputs, local_call, halves)
        return self._to_tokens(output), lse

    def cotangent(self, output: Array, lse: Array, d_output: Array, d_lse: Array) -> Cotangent:
        """What the backward half starts from, of this rank's heads; `output` and `d_output` are of its tokens."""
        delta = (output.astype(lse.dtype) * d_output.astype(lse.dtype)).sum(-1)
        delta = self._to_heads(delta) - jnp.where(lse != -jnp.inf, d_lse, 0)
        return Cotangent(self._to_heads(d_output), lse, delta)

    def _own_heads(self, sinks: Shaped[Array, " N"]) -> Shaped[Array, " n"]:
        num_heads = self.call.num_heads // self.split.num_ranks
        return lax.dynamic_slice_in_dim(sinks, lax.axis_index(self.split.axis) * num_heads, num_heads)

    def _to_heads(self, x: Shaped[Array, "B t N ..."]) -> Shaped[Array, "B T n ..."]:
        return self.order.sort(lax.all_to_all(x, self.split.axis, split_axis=2, concat_axis=1, tiled=True))

    def _to_tokens(self, x: Shaped[Array, "B T n ..."]) -> Shaped[Array, "B t N ..."]:
        return lax.all_to_all(self.order.unsort(x), self.split.axis, split_axis=1, concat_axis=2, tiled=True)

    def _copied(self, x: Shaped[Array, "B t K ..."]) -> Shaped[Array, "B t K*copies ..."]:
        """Fewer heads than ranks: several ranks get the same one. The sum of their gradients is the softmax's dtype."""
        num_copies = max(1, self.split.num_ranks // self.call.num_kv_heads)
        if num_copies == 1:
            return x
        return jnp.repeat(x.astype(self.call.softmax_dtype), num_copies, axis=2).astype(x.dtype)


def part_class(call: AttentionCall, split: Split) -> type[AllToAll]:
    """The class of one rank's part."""
    return AllToAll
