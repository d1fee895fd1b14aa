"""Gather: every rank gathers all keys and values, and attends from its own queries to them.

dK and dV come home by a reduce-scatter. Source: Llama 3's context parallelism (arXiv:2407.21783).
"""

from __future__ import annotations

from jaxtyping import Array, Shaped

from kernels.call import AttentionCall, AttentionInputs
from kernels.context.exchanges.collected import Collected, arange_like
from kernels.context.split import Split


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Serves every call."""
    return None


def local_call(call: AttentionCall, split: Split) -> AttentionCall:
    """What a rank's kernel is called for: its own queries, whose places it learns at run time, and all keys."""
    return call._replace(kv_len=split.length, has_query_positions=True)


class Gather(Collected):
    """One rank's part. See `Collected`."""

    def queries(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B t ..."]:
        return x

    queries_back = queries

    def keys(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B T ..."]:
        return self.order.sort(self.split.gather(x))

    def keys_back(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B t ..."]:
        return self.split.sum_to_owners(self.order.unsort(x.astype(self.call.softmax_dtype)))

    def collect(self, inputs: AttentionInputs) -> AttentionInputs:
        key, value = self.keys(inputs.key), self.keys(inputs.value)
        positions, ids = inputs.query_positions, inputs.query_segment_ids
        return AttentionInputs(
            inputs.query,
            key,
            value,
            inputs.sinks,
            ids,
            None if ids is None else self.keys(ids),
            self.split.places(inputs) if positions is None else positions,
            arange_like(key) if positions is None else self.keys(positions),
        )


part = Gather
