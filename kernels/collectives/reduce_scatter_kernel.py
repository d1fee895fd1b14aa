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
from typing import Any, NamedTuple

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
    MatmulPhase,
    TileOperands,
    launch_matmul,
    multiply_rows_by,
    stages_of_rows,
    store_columns,
    store_parts,
    tile_columns,
)
from kernels.hopper.registers import WGMMA_ROWS, load_matrix


class _ReduceScatter(NamedTuple):
    """The kernel on one GPU, with references to its arrays.

    Attributes:
      tiles: of one GPU's tokens.
      peers: the other GPUs.
      num_multiprocessors: of a GPU, and so programs.
      features, matrices: the operands.
      result: this GPU's tokens of the sum.
      received: the other GPUs' products for this GPU's tokens, the next GPU's first.
      transpose: whether to multiply by the matrices' transposes.
    """

    tiles: TokenTiles
    peers: GpuPeers
    num_multiprocessors: int
    features: Sequence[Any]
    matrices: Sequence[Any]
    result: Any
    received: Sequence[Any]
    transpose: bool

    def phases(self) -> list[MatmulPhase]:
        """The tiles of the other GPUs' tokens, the next GPU's first, and last the tiles of this GPU's own."""
        own = MatmulPhase(self.tiles.num_tiles, self._operands_of(self.peers.rank), self._multiply, self._add)
        return [*map(self._phase_of, self.peers.others), own]

    @property
    def _multiply(self) -> Callable[..., None]:
        return multiply_rows_by(transpose=self.transpose)

    def _flag(self, tile, warpgroup, distance: int):
        """The flag of a tile from the GPU that is `distance` ranks after the flag's own."""
        return (distance - 1) * _num_flags(self.tiles) + tile * NUM_CONSUMERS + warpgroup

    def _operands_of(self, rank) -> Callable[[Any], TileOperands]:
        tiles, features, matrices, transpose = self.tiles, self.features, self.matrices, self.transpose
        return lambda tile: tiles.operands(tile, rank * tiles.length, features, matrices, transpose=transpose)

    def _some_columns(self, tile, warpgroup, column):
        """The place of a consumer's rows of a tile among a GPU's tokens, from some column on."""
        sequence, first_token, first_column = self.tiles.place(tile)
        here = pl.ds(first_token + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
        return sequence, here, pl.ds(first_column + column, STORED_COLUMNS)

    def _start_copy(self, destination, tile, warpgroup, column, buffer) -> None:
        plgpu.copy_smem_to_gmem(buffer, destination.at[self._some_columns(tile, warpgroup, column)])

    def _phase_of(self, distance: int) -> MatmulPhase:
        """The tiles of another GPU's rows, which it gets."""
        back = self.peers.distance_back(distance)
        sent = self.peers.reference_there(self.received[back - 1], distance)

        def announce(tile, warpgroup):
            pl.when(tile >= 0)(lambda: self.peers.signal(self._flag(tile, warpgroup, back), distance))

        def send(products, tile, warpgroup, buffers):
            # The program's tile before, whose copies have had time.
            announce(tile - self.num_multiprocessors, warpgroup)
            store_columns(products[0], buffers, functools.partial(self._start_copy, sent, tile, warpgroup))

        operands = self._operands_of(self.peers.rank_after(distance))
        return MatmulPhase(self.tiles.num_tiles, operands, self._multiply, send, finish=announce)

    def _add(self, products, tile, warpgroup, buffers) -> None:
        """Adds the other GPUs' products to a tile of this GPU's tokens, and stores it."""
        for distance in self.peers.others:
            self.peers.wait(self._flag(tile, warpgroup, distance))

        def load(column):
            here = self._some_columns
            return [load_matrix(each.at[here(tile, warpgroup, column)], shared=False) for each in self.received]

        def parts() -> Iterator[tuple[Any, Callable]]:
            following = load(0)
            for column in range(0, self.tiles.columns, STORED_COLUMNS):
                of_others = following
                if column + STORED_COLUMNS < self.tiles.columns:
                    following = load(column + STORED_COLUMNS)
                total = products[0][:, column : column + STORED_COLUMNS]
                for each in of_others:
                    total += each.astype(jnp.float32)
                yield total, functools.partial(self._start_copy, self.result, tile, warpgroup, column)

        store_parts(parts(), buffers)


def _num_flags(tiles: TokenTiles) -> int:
    """Flags for the tiles from one GPU."""
    return tiles.num_tiles * NUM_CONSUMERS


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

    def make_phases(gmem) -> list[MatmulPhase]:
        operands, (result, *received) = gmem[:-num_ranks], gmem[-num_ranks:]
        features, matrices = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        peers = GpuPeers.of(axis, len(received) * _num_flags(tiles), num_ranks)
        return _ReduceScatter(
            tiles, peers, num_multiprocessors, features, matrices, result, received, transpose
        ).phases()

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
