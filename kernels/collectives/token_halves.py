"""How two GPUs' halves of the tokens are cut into the tiles of a matmul, and what its kernels say to each other.

Shapes: B batch, T tokens, t tokens of one GPU (T/2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from kernels.persistent_matmul import BLOCK_DEPTH, BLOCK_ROWS, TileOperands, div_rem, place_tile


class HalfTiles(NamedTuple):
    """The tiles of one GPU's tokens.

    Attributes:
      batch: B.
      length: t.
      columns: of a tile.
      num_across: tiles side by side.
    """

    batch: int
    length: int
    columns: int
    num_across: int

    @property
    def blocks_of_length(self) -> int:
        """Blocks of rows in a sequence."""
        return self.length // BLOCK_ROWS

    @property
    def num_blocks(self) -> int:
        """Blocks of rows in all sequences."""
        return self.batch * self.blocks_of_length

    @property
    def num_tiles(self) -> int:
        return self.num_blocks * self.num_across

    def block(self, tile) -> tuple[Any, Any]:
        """The block of rows of a tile, and which of the tiles side by side it is."""
        return place_tile(tile, self.num_blocks, self.num_across)

    def place(self, tile) -> tuple[Any, Any, Any]:
        """Sequence, first of a GPU's tokens and first column of a tile."""
        block, across = self.block(tile)
        sequence, block = div_rem(block, self.blocks_of_length)
        return sequence, block * BLOCK_ROWS, across * self.columns

    def operands(
        self, tile, first_token, rows: Sequence[Any], matrices: Sequence[Any], *, transpose: bool
    ) -> TileOperands:
        """Of a tile of the sum of products of rows and matrices.

        Args:
          tile: its number.
          first_token: of the GPU whose tokens they are, in the arrays of rows.
          rows: references to arrays `[B, tokens, F]`.
          matrices: references to arrays `[F, features]`; `[features, F]` with `transpose`.
          transpose: whether to multiply by the matrices' transposes.
        """
        sequence, token, first_column = self.place(tile)
        here, across = pl.ds(first_token + token, BLOCK_ROWS), pl.ds(first_column, self.columns)

        def left(rows, step):
            return rows.at[sequence, here, pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)]

        def right(matrix, step):
            along = pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)
            return matrix.at[across, along] if transpose else matrix.at[along, across]

        return TileOperands(
            BLOCK_ROWS,
            [each.shape[2] // BLOCK_DEPTH for each in rows],
            [functools.partial(left, each) for each in rows],
            [functools.partial(right, each) for each in matrices],
        )


class GpuPair(NamedTuple):
    """The two GPUs, as a kernel sees them.

    Attributes:
      axis: the mesh axis of the two.
      rank: of this GPU.
      flags: semaphores by which each tells the other what has arrived.
    """

    axis: str
    rank: jax.Array
    flags: Any

    @staticmethod
    def of(axis: str, num_flags: int) -> GpuPair:
        """Within a kernel."""
        return GpuPair(axis, lax.axis_index(axis), pl.get_global(plgpu.SemaphoreType.REGULAR((num_flags,))))

    @property
    def other(self) -> jax.Array:
        """The other GPU's rank."""
        return 1 - self.rank

    def reference_there(self, reference: Any) -> Any:
        """An array of the kernel in the other GPU's memory."""
        device: Any = {self.axis: self.other}
        return plgpu.remote_ref(reference, device)

    def signal(self, flag) -> None:
        """Raises a flag of the other GPU, once what this warpgroup has copied there has arrived."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        pl.semaphore_signal(self.flags.at[flag], device_id={self.axis: self.other})

    def wait(self, flag, num_signals: int = 1) -> None:
        """Waits until a flag of this GPU has been raised so many times. Then the copy engine may read what arrived."""
        pl.semaphore_wait(self.flags.at[flag], value=num_signals, decrement=False)
        _fence_copy_engine()


@plgpu.inline_mgpu()
def _fence_copy_engine(context) -> None:
    """Orders what threads have seen before what the copy engine reads (PTX: the async proxy)."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_)
