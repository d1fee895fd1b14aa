"""A matmul of several GPUs' tokens, which each sends to the others while it multiplies its own.

A GPU first computes the tiles of its own tokens. The first tile in each block of rows also copies its tokens from
shared memory to all GPUs' memory. Then the GPU computes the tiles of the others' tokens, which have arrived by then,
block by block. Its programs wait for the other GPUs' tokens, so all of them have to run at the same time, one on each
multiprocessor.

Source: the fused all-gather of Flux (arXiv:2406.06858).

Shapes: R GPUs, B batch, T tokens, t tokens of one GPU (T/R), W width, F features.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS
from kernels.collectives.gpu_peers import GpuPeers
from kernels.collectives.token_tiles import TokenTiles
from kernels.persistent_matmul import (
    BLOCK_DEPTH,
    NUM_CONSUMERS,
    STORED_COLUMNS,
    Phase,
    launch_matmul,
    multiply_rows_by,
    stages_of_rows,
    store_columns,
    tile_columns,
)


def peer_all_gather_matmul(
    part: Float[Array, "B t W"],
    matrix: Float[Array, "W F"] | Float[Array, "F W"],
    axis: str,
    num_ranks: int,
    num_multiprocessors: int,
    *,
    transpose: bool = False,
) -> tuple[Float[Array, "B T F"], Float[Array, "B T W"]]:
    """All GPUs' tokens times this GPU's matrix, and all GPUs' tokens, in the order of the ranks.

    Args:
      part: this GPU's tokens.
      matrix: to this GPU's features; `[F, W]` with `transpose`.
      axis: the mesh axis of the GPUs.
      num_ranks: R.
      num_multiprocessors: of a GPU.
      transpose: whether to multiply by the matrix's transpose.
    """
    batch, length, depth = part.shape
    num_features = matrix.shape[0 if transpose else 1]
    columns = tile_columns(num_features)
    tiles = TokenTiles(batch, length, columns, num_features // columns)

    def make_phases(gmem) -> list[Phase]:
        part, matrix, result, whole = gmem
        # A flag for each block of rows of each other GPU's tokens, the next GPU's first.
        peers = GpuPeers.of(axis, (num_ranks - 1) * tiles.num_blocks, num_ranks)
        everywhere = [*(peers.reference_there(whole, distance) for distance in peers.others), whole]

        def flag(tile, distance: int):
            """Of a tile of the GPU so many ranks after the one whose flag it is."""
            return (distance - 1) * tiles.num_blocks + tiles.block(tile)[0]

        def operands_of(tokens, first):
            """Those of tiles whose rows lie in an array from some token on."""
            return lambda tile: tiles.operands(tile, first, [tokens], [matrix], transpose=transpose)

        def is_sent(tile):
            return tiles.block(tile)[1] == 0

        def send_stage(tile, step, left, warpgroup):
            @pl.when(is_sent(tile))
            def send():
                sequence, first_token, _ = tiles.place(tile)
                rows = warpgroup * WGMMA_ROWS
                here = pl.ds(peers.rank * length + first_token + rows, WGMMA_ROWS)
                stage, along = left.at[pl.ds(rows, WGMMA_ROWS)], pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)
                for each in everywhere:
                    plgpu.copy_smem_to_gmem(stage, each.at[sequence, here, along], commit_group=False)
                plgpu.commit_smem_to_gmem_group()
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        def store_at(first):
            def store(products, tile, warpgroup, buffers):
                sequence, first_token, first_column = tiles.place(tile)
                here = pl.ds(first + first_token + warpgroup * WGMMA_ROWS, WGMMA_ROWS)

                def start_copy(column, buffer):
                    across = pl.ds(first_column + column, STORED_COLUMNS)
                    plgpu.copy_smem_to_gmem(buffer, result.at[sequence, here, across])

                store_columns(products[0], buffers, start_copy)

            return store

        def announce(tile, warpgroup):
            @pl.when(is_sent(tile))
            def signal():
                for distance in peers.others:
                    peers.signal(flag(tile, peers.distance_back(distance)), distance)

        multiply = multiply_rows_by(transpose=transpose)

        def phase_of(distance: int) -> Phase:
            """The tiles of another GPU's tokens."""
            first = peers.rank_after(distance) * length

            def wait_for_block(tile):
                peers.wait(flag(tile, distance), NUM_CONSUMERS)

            operands = operands_of(whole, first)
            return Phase(tiles.num_tiles, operands, multiply, store_at(first), before_loads=wait_for_block)

        store_own = store_at(peers.rank * length)
        own = Phase(
            tiles.num_tiles, operands_of(part, 0), multiply, store_own, in_step=send_stage, after_steps=announce
        )
        return [own, *map(phase_of, peers.others)]

    result, whole = launch_matmul(
        make_phases,
        (part, matrix),
        [jax.ShapeDtypeStruct((batch, num_ranks * length, size), part.dtype) for size in (num_features, depth)],
        stages_of_rows(columns, transpose=transpose),
        columns,
        num_multiprocessors,
        name="all_gather_matmul",
    )
    return result, whole
