"""Attention over several devices, each of which holds a part of every row's tokens."""

from kernels.context.deal import Deal, check_deal, choose_deal, chunk_costs, deal_tokens, default_chunk_size, imbalance

__all__ = [
    "Deal",
    "check_deal",
    "choose_deal",
    "chunk_costs",
    "deal_tokens",
    "default_chunk_size",
    "imbalance",
]
