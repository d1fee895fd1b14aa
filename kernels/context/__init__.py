"""Attention over several devices, each of which holds a part of every row's tokens.

`deal` decides which tokens each rank holds, `exchange` how ranks get at each other's keys and values, and
`attend_over_mesh` is the call.
"""

from kernels.context.attention import attend_over_mesh
from kernels.context.costs import Exchange, ExchangeCost, exchange_cost
from kernels.context.deal import Deal, check_deal, choose_deal, chunk_costs, deal_tokens, default_chunk_size, imbalance
from kernels.context.exchange import ChosenExchange, choose_exchange, kernel_call
from kernels.context.layout import MeshLayout
from kernels.context.plan import ContextPlan, plan_context
from kernels.context.split import Split

__all__ = [
    "ChosenExchange",
    "ContextPlan",
    "Deal",
    "Exchange",
    "ExchangeCost",
    "MeshLayout",
    "Split",
    "attend_over_mesh",
    "check_deal",
    "choose_deal",
    "choose_exchange",
    "chunk_costs",
    "deal_tokens",
    "default_chunk_size",
    "exchange_cost",
    "imbalance",
    "kernel_call",
    "plan_context",
]
