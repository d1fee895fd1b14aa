"""Keeps XLA from fusing a kernel's call with slices of its operands or results, on GPUs.

In a scan over layers a kernel's operands may be slices of larger arrays, such as the parameters of all layers, and its
results go into larger arrays, where the backward pass finds them. XLA would then call the kernel on the larger arrays'
memory ("dynamic-slice fusion"; seen in programs of JAX 0.11.2). That goes wrong in two ways. Where a result has other
users, too, XLA keeps a call for those, and computes it twice. And a kernel that reaches for another device's memory is
given the wrong memory there: XLA looks up where the arrays lie before it slices them.
"""

from __future__ import annotations

from jax import lax
from jaxtyping import Array


def without_slice_fusion(*arrays: Array) -> tuple[Array, ...]:
    """Arrays that XLA doesn't look through: operands or results of a kernel."""
    return tuple(lax.optimization_barrier(array) for array in arrays)
