"""The kernel of one rank, as the exchanges call it."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array

from kernels.attention.core import BackendKernel
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.split import Split


class Rank(NamedTuple):
    """The static description of one rank's attention.

    Attributes:
      call: of the rank, before keys are exchanged.
      split: of the sequences over the ranks.
      kernel: the rank's.
      kernel_call: the call that the kernel serves, after keys are exchanged.
    """

    call: AttentionCall
    split: Split
    kernel: BackendKernel
    kernel_call: AttentionCall

    def fwd(self, inputs: AttentionInputs) -> tuple[Array, Array]:
        """Output and lse of the kernel's queries over the kernel's keys."""
        return self.kernel.fwd(inputs._replace(token_order=None), self.kernel_call)

    def bwd(self, inputs: AttentionInputs, cotangent: Cotangent) -> Gradients:
        """The gradients of the kernel's queries, keys and values."""
        return self.kernel.bwd(inputs._replace(token_order=None), self.kernel_call, cotangent)
