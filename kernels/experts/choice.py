"""The choice of an implementation of grouped matmuls, as all of them take it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kernels.hopper.persistent_matmul import BLOCK_DEPTH
from kernels.tracing.target import Target

GroupedMatmul = Literal["mosaic_gpu", "xla"]
"""mosaic_gpu: our kernels for Hopper GPUs, which also compute gated activations. xla: `jax.lax.ragged_dot`, everywhere;
on a GPU XLA multiplies every row by every group's matrix, and masks."""


class GroupedMatmulChoice(NamedTuple):
    """An implementation of grouped matmuls, and the device.

    Attributes:
      name: of the implementation.
      alignment: each group begins at a multiple of this number of rows.
      passed_over: why the kernel can't serve; None: it does.
      target: the device.
      interpret: whether Pallas's interpreter runs the kernel.
    """

    name: GroupedMatmul
    alignment: int
    passed_over: str | None
    target: Target
    interpret: bool = False

    @property
    def has_kernels(self) -> bool:
        """True if kernels multiply, and so `grouped_gated_mlp` serves, and a kernel copies rows."""
        return self.name == "mosaic_gpu"

    @property
    def feature_multiple(self) -> int:
        """What the numbers of features have to be multiples of."""
        return BLOCK_DEPTH if self.has_kernels else 1
