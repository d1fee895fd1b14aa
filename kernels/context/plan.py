"""The deal and the exchanges of a whole model, chosen together: what one exchange needs may cost another time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kernels.call import AttentionCall
from kernels.context.costs import Exchange
from kernels.context.deal import Deal, check_deal, choose_deal
from kernels.context.exchange import ChosenExchange, choose_exchange
from kernels.context.split import UNKNOWN_DEVICES, Split
from kernels.masks import Mask

if TYPE_CHECKING:
    from kernels.tuning import Tuning


class ContextPlan(NamedTuple):
    """How a model's rows are dealt out, and how the layers of each mask get at their keys.

    Attributes:
      deal: of all rows.
      exchanges: of the calls that were given, in their order.
    """

    deal: Deal
    exchanges: tuple[ChosenExchange, ...]


def plan_context(
    calls: Mapping[AttentionCall, float],
    axis: str,
    num_ranks: int,
    *,
    deal: Deal | None = None,
    exchange: Exchange | None = None,
    implementation: str | Tuning | None = None,
    peer_refusal: str | None = UNKNOWN_DEVICES,
) -> ContextPlan:
    """Chooses the deal and the exchanges that take the least time, by the cost model.

    Args:
      calls: of one device, before keys are exchanged, each of its own, and the number of layers that make them.
      axis: the mesh axis that splits the rows.
      num_ranks: its size.
      deal: None for the fastest.
      exchange: of all calls; None for the fastest of each.
      implementation: as for `kernels.dot_product_attention`.
      peer_refusal: why the ranks can't read each other's memory; None: they can.

    Raises:
      ValueError: no deal of the rows' length serves; or a named exchange can't serve a call.
    """
    first = next(iter(calls))
    length, has_documents = first.q_len * num_ranks, first.has_segment_ids
    masks: defaultdict[Mask, float] = defaultdict(float)
    for call, weight in calls.items():
        masks[call.mask] += weight * call.head_dim / first.head_dim
    if deal is not None:
        candidates: tuple[Deal, ...] = (deal,)
    else:
        level = choose_deal(masks, length, num_ranks, has_documents=has_documents)
        candidates = tuple(dict.fromkeys((*_known_ahead(length, num_ranks), level)))

    plans, refusal = [], None
    for candidate in candidates:
        try:
            check_deal(candidate, length, num_ranks)
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


def _known_ahead(length: int, num_ranks: int) -> tuple[Deal, ...]:
    return ("in_order", "zigzag") if length % (2 * num_ranks) == 0 else ("in_order",)
