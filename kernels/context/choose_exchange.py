"""The exchanges, in one literal table, and the choice of one for a call."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, get_args

from kernels.attention.dispatch import CantServe, select_backend
from kernels.backends import BACKENDS
from kernels.call import AttentionCall
from kernels.context.costs import Exchange, ExchangeCost, exchange_cost
from kernels.context.exchanges.halo import reach_of
from kernels.context.split import Split

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning

EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


class ChosenExchange(NamedTuple):
    """The exchange of a call.

    Attributes:
      name: the exchange.
      costs: of each exchange that serves the call.
      refusals: why each of the others can't.
    """

    name: Exchange
    costs: dict[Exchange, ExchangeCost]
    refusals: dict[Exchange, str]


def exchange_module(name: Exchange) -> ModuleType:
    """The module of an exchange. `kernels.context.exchanges` says which functions it has."""
    return importlib.import_module(f"kernels.context.exchanges.{name}")


def kernel_call(name: Exchange, call: AttentionCall, split: Split) -> AttentionCall:
    """The call of a device's kernel, given the device's call before keys are exchanged.

    The lse is always asked for, since the backward pass needs it.
    """
    return exchange_module(name).kernel_call(call, split)._replace(return_lse=True)


def choose_exchange(
    call: AttentionCall,
    split: Split,
    exchange: Exchange | None = None,
    implementation: str | Tuning | None = None,
) -> ChosenExchange:
    """The exchange of a call.

    Args:
      call: of one device, before keys are exchanged.
      split: of the sequences.
      exchange: its name. None: the first in the order of preference that the fastest backend serves and that fits in
        memory; if none fits, the one that holds least.
      implementation: as for `kernels.dot_product_attention`.

    Raises:
      ValueError: there is no such exchange, or it can't serve the call.
    """
    if exchange is not None and exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is not one of {', '.join(EXCHANGES)}, or None for the fastest")
    reasons = {name: exchange_module(name).unsupported_reason(call, split) for name in EXCHANGES}
    refusals = {name: reason for name, reason in reasons.items() if reason is not None}
    if exchange in refusals:
        raise ValueError(f"exchange={exchange!r} can't serve this call: it {refusals[exchange]}")
    served = [name for name in _fastest_first(call) if name not in refusals]
    if exchange is None:
        refusals |= _with_slower_backends(call, split, served, implementation)
        served = [name for name in served if name not in refusals]
    costs = {name: exchange_cost(name, call, split) for name in served}
    if exchange is not None:
        return ChosenExchange(exchange, costs, refusals)
    fitting = [name for name in served if costs[name].fits]
    return ChosenExchange(
        fitting[0] if fitting else min(served, key=lambda name: costs[name].held_bytes), costs, refusals
    )


def _fastest_first(call: AttentionCall) -> tuple[Exchange, ...]:
    """The exchanges in the order of preference, as experiments/benchmarks/results/context_attention_*.jsonl has it.

    A window within reach of the neighbours: they alone send keys. Documents: GPUs read from each other's memory just
    the keys that they need. Otherwise an all-to-all, which gives all ranks the same work. It takes the fewest
    bytes where keys have as many heads as queries; fewer heads were never timed.
    """
    reach = reach_of(call)
    if reach is not None and max(reach) <= call.q_len:
        return "halo", "peer", "all_to_all", "all_gather", "ring"
    if call.has_segment_ids:
        return "peer", "all_to_all", "all_gather", "halo", "ring"
    return "all_to_all", "peer", "all_gather", "halo", "ring"


def _with_slower_backends(
    call: AttentionCall, split: Split, names: Sequence[Exchange], implementation: str | Tuning | None
) -> dict[Exchange, str]:
    """The exchanges whose kernel only a slower backend serves than that of others, and what it is."""
    order = [backend.name for backend in BACKENDS]
    backends: dict[Exchange, str] = {}
    for name in names:
        try:
            backends[name] = select_backend(kernel_call(name, call, split), implementation).name
        except CantServe:  # the call itself tells the reason, if there is no other exchange
            continue
    fastest = min(backends.values(), key=order.index, default=None)
    return {
        name: f"would have its kernel served by {backends.get(name, 'none')}, and not by {fastest}"
        for name in names
        if fastest is not None and backends.get(name) != fastest
    }
