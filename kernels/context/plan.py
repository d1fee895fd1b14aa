"""The sharding of the sequence and the exchanges of a whole model, chosen together, since each depends on the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kernels.call import AttentionCall
from kernels.context.costs import Exchange
from kernels.context.exchange import ChosenExchange, choose_exchange
from kernels.context.sequence_sharding import SequenceSharding, check_sequence_sharding, choose_sequence_sharding
from kernels.context.split import UNKNOWN_DEVICES, Split
from kernels.masks import Mask

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning


class ContextPlan(NamedTuple):
    """How a model's sequences are sharded, and how the layers of each mask get at their keys.

    Attributes:
      sequence_sharding: of all rows.
      exchanges: of the calls that were given, in their order.
    """

    sequence_sharding: SequenceSharding
    exchanges: tuple[ChosenExchange, ...]


def plan_context(
    calls: Mapping[AttentionCall, float],
    axis: str,
    num_ranks: int,
    *,
    sequence_sharding: SequenceSharding | None = None,
    exchange: Exchange | None = None,
    implementation: str | Tuning | None = None,
    peer_refusal: str | None = UNKNOWN_DEVICES,
) -> ContextPlan:
    """Chooses the sharding and the exchanges that take the least time, by the cost model.

    Args:
      calls: of one device, before keys are exchanged, each of its own, and the number of layers that make them.
      axis: the mesh axis that splits the rows.
      num_ranks: its size.
      sequence_sharding: None for the fastest.
      exchange: of all calls; None for the fastest of each.
      implementation: as for `kernels.dot_product_attention`.
      peer_refusal: why the ranks can't read each other's memory; None: they can.

    Raises:
      ValueError: no sharding serves the rows' length; or a named exchange can't serve a call.
    """
    first = next(iter(calls))
    length, has_documents = first.q_len * num_ranks, first.has_segment_ids
    masks: defaultdict[Mask, float] = defaultdict(float)
    for call, weight in calls.items():
        masks[call.mask] += weight * call.head_dim / first.head_dim
    if sequence_sharding is not None:
        candidates: tuple[SequenceSharding, ...] = (sequence_sharding,)
    else:
        level = choose_sequence_sharding(masks, length, num_ranks, has_documents=has_documents)
        candidates = tuple(dict.fromkeys((*_known_ahead(length, num_ranks), level)))

    plans, refusal = [], None
    for candidate in candidates:
        try:
            check_sequence_sharding(candidate, length, num_ranks)
            split = Split.of(axis, num_ranks, candidate, length, peer_refusal)
            chosen = tuple(choose_exchange(call, split, exchange, implementation) for call in calls)
        except ValueError as error:
            refusal = refusal or error
            continue
        seconds = sum(
            each.costs[each.name].seconds * weight for each, weight in zip(chosen, calls.values(), strict=True)
        )
        plans.append((seconds, ContextPlan(candidate, chosen)))
    if not plans:
        assert refusal is not None
        raise refusal
    return min(plans, key=lambda plan: plan[0])[1]


def _known_ahead(length: int, num_ranks: int) -> tuple[SequenceSharding, ...]:
    return ("contiguous", "zigzag") if length % (2 * num_ranks) == 0 else ("contiguous",)
