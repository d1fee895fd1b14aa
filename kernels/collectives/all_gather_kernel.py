"""A matmul of several GPUs' tokens, which go from one GPU to the next while each multiplies what it has.

A GPU first computes the tiles of its own tokens, and sends these to the next GPU's memory. Then it computes the tiles
of the tokens that the GPU before it has sent, block by block, and passes them on; and so forth, until it has had all.
So something travels all the time, and each GPU sends as much as it receives. The tiles side by side in a block of rows
share out its sending: each copies some steps' tokens from shared memory. Programs wait for the other GPUs' tokens, so
all of them have to run at the same time, one on each multiprocessor.

Source: the fused all-gather of Flux (arXiv:2406.06858), along a ring.

Shapes: R GPUs, B batch, T tokens, t tokens of one GPU (T/R), W width, F features.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.collectives.gpu_peers import GpuPeers
from kernels.collectives.token_tiles import TokenTiles
from kernels.hopper.persistent_matmul import (
    BLOCK_DEPTH,
    NUM_CONSUMERS,
    STORED_COLUMNS,
    MatmulPhase,
    launch_matmul,
    multiply_rows_by,
    stages_of_rows,
    store_columns,
    tile_columns,
)
from kernels.hopper.registers import WGMMA_ROWS


def num_joined(features: Sequence[int]) -> int:
    """The number of matrices that one kernel takes: all, if its tiles are as wide as for the first one's features."""
    return len(features) if tile_columns(math.gcd(*features)) == tile_columns(features[0]) else 1


class _AllGather(NamedTuple):
    """The kernel on one GPU, with references to its arrays.

    Attributes:
      tiles: of one GPU's tokens.
      peers: the other GPUs. There are flags for the tokens of each GPU before this one, the nearest first: one for each
        block of rows.
      part: this GPU's tokens.
      matrix: all matrices side by side.
      whole, next_whole: all GPUs' tokens, in this GPU's memory and in the next GPU's.
      results: the products.
      features: of each matrix.
      transpose: whether to multiply by the matrices' transposes.
    """

    tiles: TokenTiles
    peers: GpuPeers
    part: Any
    matrix: Any
    whole: Any
    next_whole: Any
    results: Sequence[Any]
    features: Sequence[int]
    transpose: bool

    def phase(self, hops: int) -> MatmulPhase:
        """The tiles of tokens that have come `hops` hops: of the GPU that is `hops` ranks before."""
        tiles, peers = self.tiles, self.peers
        first = (peers.rank_after(peers.num_ranks - hops) if hops else peers.rank) * tiles.length
        source, source_first = (self.whole, first) if hops else (self.part, 0)
        is_last = hops == peers.num_ranks - 1
        destinations = ([] if is_last else [self.next_whole]) + ([] if hops else [self.whole])

        def wait_for_block(tile):
            if hops:
                peers.wait(self._flag(tile, hops), tiles.num_across * NUM_CONSUMERS)

        def announce(tile, warpgroup):
            if not is_last:
                peers.signal(self._flag(tile, hops + 1), 1)

        return MatmulPhase(
            tiles.num_tiles,
            lambda tile: tiles.operands(tile, source_first, [source], [self.matrix], transpose=self.transpose),
            multiply_rows_by(transpose=self.transpose),
            functools.partial(self._store, first),
            before_loads=wait_for_block,
            in_step=functools.partial(self._send_stage, first, destinations),
            after_steps=announce,
        )

    def _flag(self, tile, hops: int):
        """The flag of a tile of tokens that have come `hops` hops."""
        return (hops - 1) * self.tiles.num_blocks + self.tiles.block(tile)[0]

    def _send_stage(self, first, destinations: Sequence[Any], tile, step, left, warpgroup) -> None:
        """Sends a step's tokens from shared memory, if this tile of those side by side has to."""
        if not destinations:
            return

        @pl.when(lax.rem(step, self.tiles.num_across) == self.tiles.block(tile)[1])
        def send():
            sequence, first_token, _ = self.tiles.place(tile)
            rows = warpgroup * WGMMA_ROWS
            here = pl.ds(first + first_token + rows, WGMMA_ROWS)
            stage, along = left.at[pl.ds(rows, WGMMA_ROWS)], pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)
            for each in destinations:
                plgpu.copy_smem_to_gmem(stage, each.at[sequence, here, along], commit_group=False)

        # Also a group of no copy: the stage before may have been sent, and is loaded anew after this step.
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    def _store(self, first, products, tile, warpgroup, buffers) -> None:
        """Stores a consumer's rows of a tile among the products by each matrix."""
        sequence, first_token, first_column = self.tiles.place(tile)
        here = pl.ds(first + first_token + warpgroup * WGMMA_ROWS, WGMMA_ROWS)

        def start_copy(column, buffer):
            for result, begin in zip(self.results, itertools.accumulate(self.features, initial=0), strict=False):
                across = first_column + column - begin

                @pl.when((across >= 0) & (across < result.shape[2]))
                def copy(result=result, across=across):
                    place = result.at[sequence, here, pl.ds(across, STORED_COLUMNS)]
                    plgpu.copy_smem_to_gmem(buffer, place, commit_group=False)

            plgpu.commit_smem_to_gmem_group()

        store_columns(products[0], buffers, start_copy)


def peer_all_gather_matmul(
    part: Float[Array, "B t W"],
    matrices: Sequence[Float[Array, "W ?F"] | Float[Array, "?F W"]],
    axis: str,
    num_ranks: int,
    num_multiprocessors: int,
    *,
    transpose: bool = False,
) -> tuple[Array, ...]:
    """All GPUs' tokens times each of this GPU's matrices, `[B, T, F]`, and last all GPUs' tokens, `[B, T, W]`.

    Tokens come in the order of the ranks.

    Args:
      part: this GPU's tokens.
      matrices: to this GPU's features; `[F, W]` with `transpose`.
      axis: the mesh axis of the GPUs.
      num_ranks: R.
      num_multiprocessors: of a GPU.
      transpose: whether to multiply by the matrices' transposes.
    """
    batch, length, depth = part.shape
    along_features = 0 if transpose else 1
    features = [matrix.shape[along_features] for matrix in matrices]
    # A tile's features are one matrix's.
    columns = tile_columns(math.gcd(*features))
    tiles = TokenTiles(batch, length, columns, sum(features) // columns)

    def make_phases(gmem) -> list[MatmulPhase]:
        part, matrix, whole, *results = gmem
        peers = GpuPeers.of(axis, (num_ranks - 1) * tiles.num_blocks, num_ranks)
        next_whole = peers.reference_there(whole, 1)
        kernel = _AllGather(tiles, peers, part, matrix, whole, next_whole, results, features, transpose)
        return list(map(kernel.phase, range(num_ranks)))

    whole, *products = launch_matmul(
        make_phases,
        (part, jnp.concatenate(matrices, axis=along_features)),
        [jax.ShapeDtypeStruct((batch, num_ranks * length, size), part.dtype) for size in (depth, *features)],
        stages_of_rows(columns, transpose=transpose),
        columns,
        num_multiprocessors,
        name="all_gather_matmul",
    )
    return *products, whole
