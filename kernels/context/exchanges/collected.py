"""Exchanges in which a rank collects its kernel's inputs and returns the outputs: all-gather, a halo that XLA sends.

Dimensions: B batch, t tokens of a rank, N query heads, K key/value heads, X features of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from kernels.attention.core import Halves
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.split import Split


class Collected(ABC):
    """One rank's part of an exchange that calls the kernel once, on everything that its queries attend to.

    Args:
      inputs: what the rank holds. Only the tokens' integers are read.
      call: of one rank.
      split: of the rows.
    """

    def __init__(self, inputs: AttentionInputs, call: AttentionCall, split: Split):
        self.call, self.split = call, split
        self.order = split.row_order(inputs)

    @abstractmethod
    def queries(self, x: Shaped[Array, "B t N *X"]) -> Array:
        """Brings queries, or what there is for each query, to the kernel: a permutation over the ranks."""

    @abstractmethod
    def queries_back(self, x: Array) -> Shaped[Array, "B t N *X"]:
        """The inverse of `queries`."""

    @abstractmethod
    def keys(self, arrays: tuple[Shaped[Array, "B t K *X"], ...]) -> tuple[Array, ...]:
        """Brings keys and values to the kernel."""

    @abstractmethod
    def keys_back(self, arrays: tuple[Array, ...]) -> tuple[Shaped[Array, "B t K *X"], ...]:
        """The transpose of `keys`, in the softmax's dtype: a key's gradient is the sum over the ranks that read it."""

    @abstractmethod
    def collect(self, inputs: AttentionInputs) -> AttentionInputs:
        """The kernel's inputs."""

    def forward(self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves) -> tuple[Array, Array]:
        """Output and lse of this rank's queries."""
        output, lse = halves.forward(self.collect(inputs), local_call, halves.tuning)
        return self.queries_back(output), self.queries_back(lse)

    def backward(
        self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves, cotangent: Cotangent
    ) -> Gradients:
        """Gradients of this rank's queries, keys and values."""
        collected = Cotangent(*map(self.queries, cotangent))
        d_query, *of_keys = halves.backward(self.collect(inputs), local_call, halves.tuning, collected)
        d_key, d_value = (d.astype(local_call.dtype) for d in self.keys_back(tuple(of_keys)))
        return self.queries_back(d_query), d_key, d_value


def arange_like(key: Shaped[Array, "B S ..."]) -> Int[Array, "B S"]:
    """Positions of keys that count from 0."""
    return jnp.broadcast_to(jnp.arange(key.shape[1], dtype=jnp.int32), key.shape[:2])
