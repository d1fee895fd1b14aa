"""Attention of new tokens to a key/value cache of many sequences, and the two forms of that cache."""

from kernels.decode.attention import decode_attention
from kernels.decode.slab import SlabCache, slab_capacity
from kernels.decode.tokens import CacheFull
from kernels.decode.tree import TokenTree
from kernels.decode.unified import SlotTable, UnifiedCache

__all__ = ["CacheFull", "SlabCache", "SlotTable", "TokenTree", "UnifiedCache", "decode_attention", "slab_capacity"]
