"""All-gather: every rank gathers the keys and values that any rank needs, and attends from its own queries to them.

Documents and windows bound what is needed (`needed.py`). It is all of them where neither does. dK and dV come home by a
reduce-scatter.

Source: Llama 3's context parallelism (arXiv:2407.21783).
"""

from __future__ import annotations

from jaxtyping import Array, Shaped

from kernels.call import AttentionCall, AttentionInputs
from kernels.context.exchanges.collected import Collected, arange_like
from kernels.context.exchanges.needed import NeededChunks, can_leave_any
from kernels.context.split import Split


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Serves every call."""
    return None


def local_call(call: AttentionCall, split: Split) -> AttentionCall:
    """What a rank's kernel is called for: its own queries, whose token order it learns at run time, and whole rows."""
    position_run = 1 if call.has_positions else split.run_length
    return call._replace(kv_len=split.length, has_query_positions=True, position_run=position_run)


class AllGather(Collected):
    """One rank's part. See `Collected`."""

    def __init__(self, inputs: AttentionInputs, call: AttentionCall, split: Split):
        super().__init__(inputs, call, split)
        self.needed = None
        if can_leave_any(call, split):
            chunks = split.chunks(self.order, call.batch)
            self.needed = NeededChunks(call, split, chunks, inputs.query_segment_ids)

    def queries(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B t ..."]:
        return x

    queries_back = queries

    def keys(self, arrays: tuple[Shaped[Array, "B t ..."], ...]) -> tuple[Shaped[Array, "B T ..."], ...]:
        return tuple(map(self.order.gather, arrays)) if self.needed is None else self.needed.gather(arrays)

    def keys_back(self, arrays: tuple[Shaped[Array, "B T ..."], ...]) -> tuple[Shaped[Array, "B t ..."], ...]:
        if self.needed is not None:
            return self.needed.sum_to_owners(arrays)
        dtype = self.call.softmax_dtype
        return tuple(self.split.sum_to_owners(self.order.unsort(x.astype(dtype))) for x in arrays)

    def collect(self, inputs: AttentionInputs) -> AttentionInputs:
        key, value = self.keys((inputs.key, inputs.value))
        positions, ids = inputs.query_positions, inputs.query_segment_ids
        return AttentionInputs(
            inputs.query,
            key,
            value,
            inputs.sinks,
            ids,
            None if ids is None else self.order.gather(ids),
            self.split.token_order(inputs) if positions is None else positions,
            arange_like(key) if positions is None else self.order.gather(positions),
        )


def part_class(call: AttentionCall, split: Split) -> type[AllGather]:
    """The class of one rank's part."""
    return AllGather
