"""Attention over several devices, each of which holds a part of every sequence's tokens.

`sequence_sharding` decides which tokens each rank holds, `exchange` how ranks get at each other's keys and values, and
`attend_over_mesh` is the call.
"""

from kernels.context.attention import attend_over_mesh
from kernels.context.choose_exchange import ChosenExchange, choose_exchange, kernel_call
from kernels.context.costs import Exchange, ExchangeCost, exchange_cost
from kernels.context.layout import MeshLayout
from kernels.context.plan import ContextPlan, plan_context
from kernels.context.sequence_sharding import (
    SequenceSharding,
    check_sequence_sharding,
    choose_sequence_sharding,
    chunk_costs,
    default_chunk_size,
    imbalance,
    shard_sequence,
)
from kernels.context.split import Split

__all__ = [
    "ChosenExchange",
    "ContextPlan",
    "Exchange",
    "ExchangeCost",
    "MeshLayout",
    "SequenceSharding",
    "Split",
    "attend_over_mesh",
    "check_sequence_sharding",
    "choose_exchange",
    "choose_sequence_sharding",
    "chunk_costs",
    "default_chunk_size",
    "exchange_cost",
    "imbalance",
    "kernel_call",
    "plan_context",
    "shard_sequence",
]
