"""A matmul whose products several GPUs sum up: each keeps its own tokens' rows, and sends the others' meanwhile.

A GPU first computes the tiles of the others' rows. They leave from shared memory over NVLink, under the matmuls of the
next tiles. Then it computes its own rows' tiles, and adds what the other GPUs have sent: in float32, rounded once. As
its programs wait for that, all of them have to run at the same time, one on each multiprocessor.

Source: the fused reduce-scatter of Flux (arXiv:2406.06858).

Shapes: R GPUs, B batch, T tokens, t tokens of one GPU (T/R), F features that are summed, W width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.collectives.gpu_peers import GpuPeers
from kernels.collectives.token_tiles import TokenTiles
from kernels.hopper.persistent_matmul import (
    NUM_CONSUMERS,
    STORED_COLUMNS,
    Phase,
    launch_matmul,
    multiply_rows_by,
    stages_of_rows,
    store_columns,
    store_parts,
    tile_columns,
)
from kernels.hopper.registers import WGMMA_ROWS, load_matrix


def peer_matmul_reduce_scatter(
    features: Sequence[Float[Array, "B T F"]],
    matrices: Sequence[Float[Array, "F W"] | Float[Array, "W F"]],
    axis: str,
    num_ranks: int,
    num_multiprocessors: int,
    *,
    transpose: bool = False,
) -> Float[Array, "B t W"]:
    """This GPU's tokens of the sum of all products of all GPUs.

    Args:
      features: this GPU's, of all tokens; each product may have a number of its own.
      matrices: from this GPU's features; `[W, F]` with `transpose`.
      axis: the mesh axis of the GPUs.
      num_ranks: R.
      num_multiprocessors: of a GPU.
      transpose: whether to multiply by the matrices' transposes.
    """
    batch, whole_length, _ = features[0].shape
    width, length, dtype = matrices[0].shape[0 if transpose else 1], whole_length // num_ranks, features[0].dtype
    columns = tile_columns(width)
    tiles = TokenTiles(batch, length, columns, width // columns)

    def make_phases(gmem) -> list[Phase]:
        operands, (result, *received) = gmem[:-num_ranks], gmem[-num_ranks:]
        features, matrices = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        num_flags = tiles.num_tiles * NUM_CONSUMERS
        peers = GpuPeers.of(axis, len(received) * num_flags, num_ranks)

        def flag(tile, warpgroup, distance: int):
            """Of a tile from the GPU so many ranks after the one whose flag it is."""
            return (distance - 1) * num_flags + tile * NUM_CONSUMERS + warpgroup

        def operands_of(rank):
            return lambda tile: tiles.operands(tile, rank * length, features, matrices, transpose=transpose)

        def some_columns(tile, warpgroup, column):
            """Where a consumer's rows of a tile lie among a GPU's tokens, from some column on."""
            sequence, first_token, first_column = tiles.place(tile)
            here = pl.ds(first_token + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
            return sequence, here, pl.ds(first_column + column, STORED_COLUMNS)

        def start_copy(destination, tile, warpgroup, column, buffer):
            plgpu.copy_smem_to_gmem(buffer, destination.at[some_columns(tile, warpgroup, column)])

        def phase_of(distance: int) -> Phase:
            """The tiles of another GPU's rows, which it gets."""
            back = peers.distance_back(distance)
            sent = peers.reference_there(received[back - 1], distance)

            def announce(tile, warpgroup):
                pl.when(tile >= 0)(lambda: peers.signal(flag(tile, warpgroup, back), distance))

            def send(products, tile, warpgroup, buffers):
                announce(tile - num_multiprocessors, warpgroup)  # the program's tile before, whose copies have had time
                store_columns(products[0], buffers, functools.partial(start_copy, sent, tile, warpgroup))

            return Phase(tiles.num_tiles, operands_of(peers.rank_after(distance)), multiply, send, finish=announce)

        def add(products, tile, warpgroup, buffers):
            for distance in peers.others:
                peers.wait(flag(tile, warpgroup, distance))

            def load(column):
                return [load_matrix(each.at[some_columns(tile, warpgroup, column)], shared=False) for each in received]

            def parts() -> Iterator[tuple[Any, Callable]]:
                following = load(0)
                for column in range(0, columns, STORED_COLUMNS):
                    of_others = following
                    if column + STORED_COLUMNS < columns:
                        following = load(column + STORED_COLUMNS)
                    total = products[0][:, column : column + STORED_COLUMNS]
                    for each in of_others:
                        total += each.astype(jnp.float32)
                    yield total, functools.partial(start_copy, result, tile, warpgroup, column)

            store_parts(parts(), buffers)

        multiply = multiply_rows_by(transpose=transpose)
        own = Phase(tiles.num_tiles, operands_of(peers.rank), multiply, add)
        return [*map(phase_of, peers.others), own]

    own = jax.ShapeDtypeStruct((batch, length, width), dtype)
    result, *_ = launch_matmul(
        make_phases,
        (*features, *matrices),
        [own] * num_ranks,
        stages_of_rows(columns, transpose=transpose),
        columns,
        num_multiprocessors,
        name="matmul_reduce_scatter",
    )
    return result
