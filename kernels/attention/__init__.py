"""Attention of one call: `dispatch` chooses a backend, `core` makes one differentiable function of `fwd` and `bwd`."""

from kernels.attention.dispatch import CantServe, Selection, dot_product_attention, select_backend

__all__ = ["CantServe", "Selection", "dot_product_attention", "select_backend"]
