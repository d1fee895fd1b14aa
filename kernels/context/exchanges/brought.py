"""Exchanges that bring the kernel's inputs before the custom gradient begins: all-to-all, peer, a halo that is read.

So what was brought is kept for the backward pass, and JAX differentiates the bringing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Array

from kernels.attention.core import Halves
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients


class Brought(ABC):
    """One rank's part of an exchange that calls the kernel once, on what `bring` returned."""

    @abstractmethod
    def bring(self, inputs: AttentionInputs, halves: Halves) -> AttentionInputs:
        """The kernel's inputs; differentiable."""

    def forward(self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves) -> tuple[Array, Array]:
        """Output and lse of this rank's queries."""
        return halves.forward(inputs._replace(token_order=None), local_call, halves.tuning)

    def backward(
        self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves, cotangent: Cotangent
    ) -> Gradients:
        """Gradients of what `bring` returned."""
        return halves.backward(inputs._replace(token_order=None), local_call, halves.tuning, cotangent)
