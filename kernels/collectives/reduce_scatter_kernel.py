"""A matmul whose products two GPUs sum up: each keeps its own tokens' rows, and sends the other's as it computes them.

A GPU first computes the tiles of the other's rows. They leave from shared memory over NVLink, under the matmuls of the
next tiles. Then it computes its own rows' tiles, and adds what the other GPU has sent: in float32, rounded once. As its
programs wait for that, all of them have to run at the same time, one on each multiprocessor.

Source: the fused reduce-scatter of Flux (arXiv:2406.06858).

Shapes: B batch, T tokens, t tokens of one GPU (T/2), F features that are summed, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS
from kernels.collectives.gpu_peers import GpuPeers
from kernels.collectives.token_halves import HalfTiles
from kernels.persistent_matmul import (
    NUM_CONSUMERS,
    STORE_BUFFERS,
    STORED_COLUMNS,
    Phase,
    launch_matmul,
    multiply_rows_by,
    stages_of_rows,
    store_columns,
    tile_columns,
)


def peer_matmul_reduce_scatter(
    features: Sequence[Float[Array, "B T F"]],
    matrices: Sequence[Float[Array, "F W"] | Float[Array, "W F"]],
    axis: str,
    num_multiprocessors: int,
    *,
    transpose: bool = False,
) -> Float[Array, "B t W"]:
    """This GPU's tokens of the sum of all products of both GPUs.

    Args:
      features: this GPU's, of all tokens; each product may have a number of its own.
      matrices: from this GPU's features; `[W, F]` with `transpose`.
      axis: the mesh axis of the two.
      num_multiprocessors: of a GPU.
      transpose: whether to multiply by the matrices' transposes.
    """
    batch, whole_length, _ = features[0].shape
    width, length, dtype = matrices[0].shape[0 if transpose else 1], whole_length // 2, features[0].dtype
    columns = tile_columns(width)
    tiles = HalfTiles(batch, length, columns, width // columns)
    num_parts = columns // STORED_COLUMNS

    def make_phases(gmem, arrived) -> list[Phase]:
        *operands, result, received = gmem
        features, matrices = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        peers = GpuPeers.of(axis, tiles.num_tiles * NUM_CONSUMERS)
        sent = peers.reference_there(received)

        def flag(tile, warpgroup):
            return tile * NUM_CONSUMERS + warpgroup

        def operands_of(rank):
            return lambda tile: tiles.operands(tile, rank * length, features, matrices, transpose=transpose)

        def some_columns(tile, warpgroup, column):
            """Where a consumer's rows of a tile lie among a GPU's tokens, from some column on."""
            sequence, first_token, first_column = tiles.place(tile)
            here = pl.ds(first_token + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
            return sequence, here, pl.ds(first_column + column, STORED_COLUMNS)

        def announce(tile, warpgroup):
            pl.when(tile >= 0)(lambda: peers.signal(flag(tile, warpgroup)))

        def send(products, tile, warpgroup, buffers):
            announce(tile - num_multiprocessors, warpgroup)  # the program's tile before, whose copies have had time

            def start_copy(column, buffer):
                plgpu.copy_smem_to_gmem(buffer, sent.at[some_columns(tile, warpgroup, column)])

            store_columns(products[0], buffers, start_copy)

        def start_load(tile, warpgroup, part, buffers):
            buffer = part % STORE_BUFFERS
            source = received.at[some_columns(tile, warpgroup, part * STORED_COLUMNS)]
            plgpu.copy_gmem_to_smem(source, buffers.at[buffer], arrived.at[warpgroup * STORE_BUFFERS + buffer])

        def start_loads(tile, warpgroup, buffers):
            peers.wait(flag(tile, warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for part in range(min(STORE_BUFFERS, num_parts)):
                start_load(tile, warpgroup, part, buffers)

        def add(products, tile, warpgroup, buffers):
            for part in range(num_parts):
                column, buffer = part * STORED_COLUMNS, buffers.at[part % STORE_BUFFERS]
                plgpu.barrier_wait(arrived.at[warpgroup * STORE_BUFFERS + part % STORE_BUFFERS])
                theirs = plgpu.layout_cast(buffer[...], plgpu.Layout.WGMMA).astype(jnp.float32)
                buffer[...] = (products[0][:, column : column + STORED_COLUMNS] + theirs).astype(buffers.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, result.at[some_columns(tile, warpgroup, column)])
                if part + STORE_BUFFERS < num_parts:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    start_load(tile, warpgroup, part + STORE_BUFFERS, buffers)

        multiply = multiply_rows_by(transpose=transpose)
        return [
            Phase(tiles.num_tiles, operands_of(peers.rank_after()), multiply, send, finish=announce),
            Phase(tiles.num_tiles, operands_of(peers.rank), multiply, add, before_steps=start_loads),
        ]

    own = jax.ShapeDtypeStruct((batch, length, width), dtype)
    result, _ = launch_matmul(
        make_phases,
        (*features, *matrices),
        [own, own],
        stages_of_rows(columns, transpose=transpose),
        columns,
        num_multiprocessors,
        name="matmul_reduce_scatter",
        scratch=[plgpu.Barrier(num_barriers=NUM_CONSUMERS * STORE_BUFFERS)],
    )
    return result
