"""The Hopper kernels of gated MLPs for groups of rows: matmuls that compute the activation before they store.

Dimensions: R rows, G groups, W features of a row, F hidden features of a group's MLP.
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

from kernels.experts.choice import GroupedMatmulChoice
from kernels.experts.matmul_kernels import RowTiles, launch
from kernels.experts.row_groups import RowGroups
from kernels.hopper.persistent_matmul import (
    NUM_CONSUMERS,
    STORED_COLUMNS,
    MatmulPhase,
    multiply_rows_by,
    stages_of_rows,
    store_parts,
    tile_columns,
)
from kernels.hopper.registers import WGMMA_ROWS, load_matrix, load_vector, spread

_GATED_COLUMNS = 128  # of a tile, of features and of their gates
_NUM_LOADED = 2  # features and gates, each in one of the buffers that rows leave through


Activation = Callable[[Any, Any], tuple[Any, Any, Any]]
"""(gate, features) → hidden features, and their slopes in the gate and in the features, element by element."""


class GatedMatrices(NamedTuple):
    """The parameters of the groups' MLPs, in the rows' dtype; the biases may be None, both at a time."""

    up: Float[Array, "G W F"]
    gate: Float[Array, "G W F"]
    down: Float[Array, "G F W"]
    up_bias: Float[Array, "G F"] | None = None
    gate_bias: Float[Array, "G F"] | None = None

    @property
    def reads_all_rows(self) -> bool:
        """True if a gradient sums over all rows, also over those after the last group's, which must then be finite."""
        return self.up_bias is not None


class GatedFeatures(NamedTuple):
    """The features between the matrices of the groups' MLPs."""

    features: Float[Array, "R F"]
    gates: Float[Array, "R F"]
    hidden: Float[Array, "R F"]


def multiply_gated(
    rows: Float[Array, "R W"],
    matrices: GatedMatrices,
    weights: Float[Array, " R"],
    groups: RowGroups,
    activation: Activation,
    choice: GroupedMatmulChoice,
) -> GatedFeatures:
    """Features, gates, and the hidden features of both, each row's times its weight."""
    num_columns = matrices.up.shape[2]
    tiles = RowTiles.of(groups, num_columns, _GATED_COLUMNS, stores_all=matrices.reads_all_rows)
    biases = [each for each in (matrices.up_bias, matrices.gate_bias) if each is not None]

    def make_phases(gmem) -> list[MatmulPhase]:
        rows, up, gate, weights, block_groups, block_ends, *biases, features, gates, hidden = gmem
        here = tiles.on(block_groups, block_ends)

        def store(products, tile, warpgroup, buffers):
            first_row, first_column = here.place(tile, warpgroup)
            # The last pair may have one block of rows.
            first_row = jnp.minimum(first_row, tiles.num_rows - WGMMA_ROWS)
            own_weights = load_vector(weights.at[pl.ds(first_row, WGMMA_ROWS)], rows=True, shared=False)

            def parts() -> Iterator[tuple[Any, Callable]]:
                for column in range(0, _GATED_COLUMNS, STORED_COLUMNS):
                    linear = [product[:, column : column + STORED_COLUMNS] for product in products]
                    if biases:
                        group = here.group(tile)
                        # The last tile may have half the columns.
                        across = pl.ds(jnp.minimum(first_column + column, num_columns - STORED_COLUMNS), STORED_COLUMNS)
                        linear = [
                            each + _load_columns(bias.at[group, across], each.shape)
                            for each, bias in zip(linear, biases, strict=True)
                        ]
                    of_rows, of_gates = linear
                    weighted = activation(of_gates, of_rows)[0] * spread(own_weights, of_rows.shape, rows=True)
                    for part, result in ((of_rows, features), (of_gates, gates), (weighted, hidden)):
                        yield part, functools.partial(here.store, result, tile, warpgroup, column)

            pl.when(here.is_stored(tile))(lambda: store_parts(parts(), buffers))

        operands = functools.partial(here.operands, rows=[rows], matrices=[[up, gate]], transpose=False)
        return [MatmulPhase(tiles.num_tiles, operands, multiply_rows_by(transpose=False), store)]

    return GatedFeatures(
        *launch(
            make_phases,
            (rows, matrices.up, matrices.gate, weights, tiles.groups, tiles.ends, *biases),
            [jax.ShapeDtypeStruct((tiles.num_rows, num_columns), rows.dtype)] * 3,
            stages_of_rows(_GATED_COLUMNS, transpose=False),
            _GATED_COLUMNS,
            choice,
            name="multiply_gated",
            num_matrices=2,
        )
    )


class _GatedGradient(NamedTuple):
    """The kernel of `differentiate_gated`, with references to its arrays.

    Attributes:
      tiles: of the gradients of features and gates.
      features, gates, weights: of all rows.
      results: the gradients of features and of gates, and the hidden features.
      of_weights: the gradients of the weights, summed up over a tile's columns.
      arrived: barriers of the features and gates that each consumer loads.
      activation: as for `differentiate_gated`.
    """

    tiles: RowTiles
    features: Any
    gates: Any
    weights: Any
    results: Sequence[Any]
    of_weights: Any
    arrived: Any
    activation: Activation

    def start_loads(self, tile, warpgroup, buffers) -> None:
        """Loads the first columns' features and gates while the products are computed."""
        _, own, first_column = self._place(tile, warpgroup)

        @pl.when(self.tiles.is_stored(tile))
        def load():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, each in enumerate((self.features, self.gates)):
                columns = each.at[own, pl.ds(first_column, STORED_COLUMNS)]
                plgpu.copy_gmem_to_smem(columns, buffers.at[i], self.arrived.at[warpgroup * _NUM_LOADED + i])

    def store(self, products, tile, warpgroup, buffers) -> None:
        """Stores a consumer's rows of a tile."""
        pl.when(self.tiles.is_stored(tile))(lambda: self._store_rows(products[0], tile, warpgroup, buffers))

    def _place(self, tile, warpgroup) -> tuple[Any, Any, Any]:
        """A consumer's first row, its rows, and the tile's first column."""
        first_row, first_column = self.tiles.place(tile, warpgroup)
        # The last pair may have one block of rows.
        return first_row, pl.ds(jnp.minimum(first_row, self.tiles.num_rows - WGMMA_ROWS), WGMMA_ROWS), first_column

    def _first_columns(self, warpgroup, buffers) -> list[Any]:
        for i in range(_NUM_LOADED):
            plgpu.barrier_wait(self.arrived.at[warpgroup * _NUM_LOADED + i])
        return [load_matrix(buffers.at[i], shared=True) for i in range(_NUM_LOADED)]

    def _store_rows(self, product, tile, warpgroup, buffers) -> None:
        columns = self.tiles.columns
        first_row, own, first_column = self._place(tile, warpgroup)
        own_weights = load_vector(self.weights.at[own], rows=True, shared=False)
        sums = []

        def load(column):
            """Starts to load other columns, for which nothing waits until they are asked for."""
            across = pl.ds(first_column + column, STORED_COLUMNS)
            loaded = [load_matrix(each.at[own, across], shared=False) for each in (self.features, self.gates)]
            return lambda: loaded

        def parts() -> Iterator[tuple[Any, Callable]]:
            following = functools.partial(self._first_columns, warpgroup, buffers)
            for column in range(0, columns, STORED_COLUMNS):
                load_here = following
                if column + STORED_COLUMNS < columns:
                    following = load(column + STORED_COLUMNS)
                of_rows, of_gates = (each.astype(jnp.float32) for each in load_here())
                of_hidden = product[:, column : column + STORED_COLUMNS]
                spread_weights = spread(own_weights, of_hidden.shape, rows=True)
                activated, in_gates, in_rows = self.activation(of_gates, of_rows)
                sums.append((of_hidden * activated).sum(axis=1))
                weighted = of_hidden * spread_weights
                for part, result in zip(
                    (weighted * in_rows, weighted * in_gates, activated * spread_weights), self.results, strict=True
                ):
                    yield part, functools.partial(self.tiles.store, result, tile, warpgroup, column)

        store_parts(parts(), buffers)

        @pl.when(first_row < self.tiles.num_rows)
        def store_sums():
            self.of_weights.at[first_column // columns, own][...] = functools.reduce(jnp.add, sums)


def differentiate_gated(
    gradients: Float[Array, "R W"],
    matrices: GatedMatrices,
    features: Float[Array, "R F"],
    gates: Float[Array, "R F"],
    weights: Float[Array, " R"],
    groups: RowGroups,
    activation: Activation,
    choice: GroupedMatmulChoice,
) -> tuple[GatedFeatures, Float[Array, " R"]]:
    """The gradients of features and gates beside the hidden features, and those of the weights.

    Args:
      gradients: of the products of hidden features and the last matrices.
    """
    num_columns = matrices.down.shape[1]
    columns = tile_columns(num_columns)
    tiles = RowTiles.of(groups, num_columns, columns, stores_all=matrices.reads_all_rows)

    def make_phases(gmem, arrived) -> list[MatmulPhase]:
        gradients, down, features, gates, weights, block_groups, block_ends, *results, of_weights = gmem
        here = tiles.on(block_groups, block_ends)
        kernel = _GatedGradient(here, features, gates, weights, results, of_weights, arrived, activation)
        operands = functools.partial(here.operands, rows=[gradients], matrices=[[down]], transpose=True)
        multiply = multiply_rows_by(transpose=True)
        return [MatmulPhase(tiles.num_tiles, operands, multiply, kernel.store, before_steps=kernel.start_loads)]

    result = jax.ShapeDtypeStruct((tiles.num_rows, num_columns), gradients.dtype)
    sums = jax.ShapeDtypeStruct((num_columns // columns, tiles.num_rows), jnp.float32)
    *results, of_weights = launch(
        make_phases,
        (gradients, matrices.down, features, gates, weights, tiles.groups, tiles.ends),
        [result, result, result, sums],
        stages_of_rows(columns, transpose=True),
        columns,
        choice,
        name="differentiate_gated",
        scratch=[plgpu.Barrier(num_barriers=NUM_CONSUMERS * _NUM_LOADED)],
    )
    return GatedFeatures(*results), of_weights.sum(0)


def _load_columns(vector, shape: tuple[int, int]) -> jax.Array:
    return spread(load_vector(vector, rows=False, shared=False).astype(jnp.float32), shape, rows=False)
