"""The sharding of the sequence and the exchanges of a whole model, chosen together, since each depends on the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kernels.call import AttentionCall
from kernels.context.choose_exchange import ChosenExchange, choose_exchange
from kernels.context.costs import Exchange
from kernels.context.exchanges.ring import documents_bound_hops
from kernels.context.sequence_sharding import SequenceSharding, check_sequence_sharding, choose_sequence_sharding
from kernels.context.split import UNKNOWN_DEVICES, Split
from kernels.masks import Mask

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning


# With documents, contiguous tokens give ranks uneven work in layers without a window. `balanced` takes the halo from
# layers with one. The times that a cost model gave to both, fitted to experiments/benchmarks/results, crossed between
# half and five sixths of the layers with a window.
_MOST_LAYERS = 0.75


class ContextPlan(NamedTuple):
    """The sharding of a model's sequences, and the exchange of the layers of each mask.

    Attributes:
      sequence_sharding: of all sequences.
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
    """Chooses the sharding of the sequence and the exchange of each call.

    Tokens are contiguous where that suits the exchange of each call, or of most layers if the others need `balanced`,
    which no halo serves. Otherwise the simplest sharding with even work is chosen.

    Args:
      calls: of one device, before keys are exchanged, each of its own, and the number of layers that make them.
      axis: the mesh axis that splits the sequences.
      num_ranks: its size.
      sequence_sharding: None for the choice.
      exchange: of all calls; None for the fastest of each.
      implementation: as for `kernels.dot_product_attention`.
      peer_refusal: why the ranks can't read each other's memory; None: they can.

    Raises:
      ValueError: the sharding doesn't serve the sequence's length; or a named exchange can't serve a call.
    """
    first = next(iter(calls))
    length = first.q_len * num_ranks

    def plan(sharding: SequenceSharding) -> ContextPlan:
        check_sequence_sharding(sharding, length, num_ranks)
        split = Split.of(axis, num_ranks, sharding, length, peer_refusal)
        return ContextPlan(sharding, tuple(choose_exchange(call, split, exchange, implementation) for call in calls))

    if sequence_sharding is not None:
        return plan(sequence_sharding)
    split = Split.of(axis, num_ranks, "contiguous", length, peer_refusal)
    try:
        contiguous = plan("contiguous")
    except ValueError as refusal:  # the halo of half as long spans of tokens may be less than all of the sequence
        try:
            return plan("zigzag")
        except ValueError:
            raise refusal from None
    chosen = {call: each.name for call, each in zip(calls, contiguous.exchanges, strict=True)}
    suited = {call for call, name in chosen.items() if _suits_contiguous(name, call, split)}
    if len(suited) == len(calls):
        return contiguous
    masks: defaultdict[Mask, float] = defaultdict(float)
    for call, weight in calls.items():
        if chosen[call] != "all_to_all":
            masks[call.mask] += weight * call.head_dim / first.head_dim
    sharding = choose_sequence_sharding(masks, length, num_ranks, has_documents=first.has_segment_ids)
    if sharding == "balanced" and sum(calls[call] for call in suited) > _MOST_LAYERS * sum(calls.values()):
        if exchange is not None:
            return contiguous
        return ContextPlan(
            "contiguous",
            tuple(
                each if call in suited else _with_even_work(each)
                for call, each in zip(calls, contiguous.exchanges, strict=True)
            ),
        )
    try:
        return plan(sharding)
    except ValueError:  # a named exchange may serve contiguous tokens alone
        return contiguous


def _with_even_work(chosen: ChosenExchange) -> ChosenExchange:
    """The all-to-all in the place of the chosen exchange, if it serves the call and fits in memory."""
    costs = chosen.costs.get("all_to_all")
    return chosen if costs is None or not costs.fits else chosen._replace(name="all_to_all")


def _suits_contiguous(name: Exchange, call: AttentionCall, split: Split) -> bool:
    """True: an exchange is at its best with contiguous tokens.

    An all-to-all gives all ranks the same work. A window gives nearly the same work, and its halo is the smallest. A
    ring ends where documents do.
    """
    return name in ("all_to_all", "halo") or (name == "ring" and documents_bound_hops(call, split))
