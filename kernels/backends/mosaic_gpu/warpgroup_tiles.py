"""The tile kinds of each warpgroup of a backward pass: some tiles of its block hold nothing for its 64 rows.

A block has 64 rows of keys, or of queries, for each warpgroup, and visits every tile that holds something for any of
them. Where short rows, windows or documents begin and end, a tile is often EMPTY to one warpgroup and not to another.
The former then passes over it, and leaves the tensor cores to the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.backends.mosaic_gpu.block_range import in_blocks, union_of_intervals
from kernels.call import AttentionCall, AttentionInputs
from kernels.hopper.registers import WGMMA_ROWS
from kernels.masks.intervals import TileKind, tile_kind
from kernels.plan import Rows, counted, make_block_plan, make_rows

# Of what the warpgroups visit otherwise. For less, the choice in each step isn't worth its instructions.
_LEAST_SHARE_OF_EMPTY_TILES = 0.03


class BlockRows(NamedTuple):
    """The tiles of each block, and of these, what each warpgroup's rows meet. Within a kernel, references.

    Attributes:
      blocks: the tiles that a block visits.
      warpgroup_bounds: `Rows.bounds` of each warpgroup's own interval, int32 `[W, blocks, warpgroups, 4]`; None where
        all warpgroups take what a tile holds for the block.
    """

    blocks: Rows
    warpgroup_bounds: Any = None

    @staticmethod
    def of(
        inputs: AttentionInputs,
        call: AttentionCall,
        block_q: int,
        block_kv: int,
        *,
        transposed: bool,
        waits_in_each_step: bool,
    ) -> BlockRows:
        """The rows of a call.

        Args:
          inputs, call, block_q, block_kv, transposed: as for `make_rows`.
          waits_in_each_step: whether the warpgroups wait for each other in every step. One that passes over a tile now
            and then, as at a window's ends, gains nothing then. So they have bounds of their own for documents alone:
            one whose document has ended passes over all tiles from there.
        """
        num_warpgroups = (block_kv if transposed else block_q) // WGMMA_ROWS
        sides = (block_q, WGMMA_ROWS) if transposed else (WGMMA_ROWS, block_kv)
        if num_warpgroups > 1 and _may_pass_over(call, (block_q, block_kv), sides, waits_in_each_step):
            own = make_rows(inputs, call, *sides, transposed=transposed)
            if own.tiles is None and own.columns is None:
                by_block = in_blocks(own, num_warpgroups)
                # A plan of the blocks would take the device as long again.
                return BlockRows(union_of_intervals(by_block), by_block)
        blocks = make_rows(inputs, call, block_q, block_kv, transposed=transposed)
        return BlockRows(blocks if blocks.columns is None else counted(blocks))

    def read_kind(self, batch, block, warpgroup) -> Callable[[Any, Any], jax.Array]:
        """Reads a warpgroup's bounds within a kernel.

        Returns:
          (tile, whether the tile is PARTIAL to the block) → its `TileKind` to the warpgroup.
        """
        if self.warpgroup_bounds is None:
            return lambda tile, is_partial: jnp.where(is_partial, TileKind.PARTIAL, TileKind.FULL)
        batch = batch if self.warpgroup_bounds.shape[0] > 1 else 0
        start, full_start, full_stop, stop = (self.warpgroup_bounds[batch, block, warpgroup, i] for i in range(4))

        def kind(tile, is_partial):
            is_met, is_full = (start <= tile) & (tile < stop), (full_start <= tile) & (tile < full_stop)
            return tile_kind(is_met, is_full)

        return kind


def _may_pass_over(
    call: AttentionCall, of_blocks: tuple[int, int], of_warpgroups: tuple[int, int], waits_in_each_step: bool
) -> bool:
    """True if enough tiles may be EMPTY to a warpgroup, given the sides of a block's tiles and of its own."""
    # A mask without a closed form is evaluated on all pairs for each plan.
    if not (call.mask.exact or call.has_positions):
        return False
    if call.has_segment_ids or call.bounds:
        return True
    if call.has_positions or waits_in_each_step:
        return False
    plans = (make_block_plan(call.mask, call.q_len, call.kv_len, *sides) for sides in (of_blocks, of_warpgroups))
    shared, own = (plan.num_visited * plan.block_q * plan.block_kv for plan in plans)
    return own <= (1 - _LEAST_SHARE_OF_EMPTY_TILES) * shared
