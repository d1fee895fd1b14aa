"""Kernels that put rows together from chunks of two GPUs' memory, and add up chunks of both.

Which of the other GPU's chunks are needed is known on the devices only, since documents decide it. A table says it for
each chunk, and nothing else is read from the other GPU. A program copies one tile of a chunk after another to shared
memory, over NVLink where it lies in the other GPU's memory, and from there to its place.

Shapes: B batch, n chunks of one GPU, C chunks of a row (2·n), L lines of a chunk, each of 256 numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels.backends.mosaic_gpu.machine import fix_dump_name
from kernels.collectives.chunk_tiles import LINE, TILE_LINES
from kernels.collectives.gpu_pair import GpuPair
from kernels.persistent_matmul import div_rem

# Lines of a tile, and stages of shared memory: 96 and 80 KiB for two arrays.
_GATHER_LINES, _GATHER_STAGES = TILE_LINES, 3
_SUM_LINES, _SUM_STAGES = TILE_LINES // 2, 4
# They fit side by side, and hide each other's waits. A program waits only for the other GPU's of its number, and only
# at its end, so it doesn't matter how many run at the same time.
_PROGRAMS_OF_A_MULTIPROCESSOR = 2


class _ChunkTile(NamedTuple):
    """A tile of the result.

    Attributes:
      sequence, chunk, lines: where it lies.
      source: the number in the table of sources for its chunk.
    """

    sequence: Any
    chunk: Any
    lines: Any
    source: Any

    def of(self, references: Sequence[Any], chunk) -> list[Any]:
        """References to the same lines of another chunk."""
        return [ref.at[(self.sequence, chunk, self.lines)] for ref in references]


class _ChunkTiles(NamedTuple):
    """How chunks are cut into tiles.

    Attributes:
      num_chunks: the first so many of each row.
      lines: of a tile.
      of_chunk: tiles of a chunk.
      num_tiles: of all rows.
    """

    num_chunks: Any
    lines: int
    of_chunk: int
    num_tiles: Any

    @staticmethod
    def of(shape: tuple[int, ...], lines: int, num_chunks: Any = None) -> _ChunkTiles:
        """Those of an array `[B, chunks, L, 256]`, or of the first `num_chunks` of its rows."""
        batch, num_all, length, _ = shape
        assert length % lines == 0, "chunks are whole tiles"
        num_chunks = num_all if num_chunks is None else num_chunks
        return _ChunkTiles(num_chunks, lines, length // lines, batch * num_chunks * (length // lines))

    def tile(self, number, sources: Any) -> _ChunkTile:
        """A tile by its number.

        Tiles that are copied at the same time are of different chunks, so that what comes over NVLink comes beside
        what doesn't.
        """
        number, chunk = div_rem(number, self.num_chunks)
        sequence, number = div_rem(number, self.of_chunk)
        return _ChunkTile(sequence, chunk, pl.ds(number * self.lines, self.lines), sources[sequence, chunk])


@jax.named_scope("gather_chunks")
def peer_gather_chunks(
    arrays: Sequence[Float[Array, "B n L 256"]],
    sources: Int[Array, "B C"],
    num_chunks: Int[Array, " 1"],
    axis: str,
    num_multiprocessors: int | None,
) -> list[Float[Array, "B C L 256"]]:
    """Rows of both GPUs' chunks.

    Args:
      arrays: this GPU's, of one shape and dtype.
      sources, num_chunks: as `ChunkTables` has them.
      axis: the mesh axis of the two.
      num_multiprocessors: of a GPU.
    """
    num_own = arrays[0].shape[1]

    def start_load(tile: _ChunkTile, here: Sequence[Any], there: Sequence[Any], start_copies: Callable):
        is_there, chunk = div_rem(tile.source, num_own)
        pl.when(is_there == 0)(lambda: start_copies(tile.of(here, chunk)))
        pl.when(is_there != 0)(lambda: start_copies(tile.of(there, chunk)))

    return _copy_chunks(
        start_load,
        arrays,
        sources,
        axis,
        num_multiprocessors,
        num_lines=_GATHER_LINES,
        num_stages=_GATHER_STAGES,
        name="gather_chunks",
        num_chunks=num_chunks,
    )


@jax.named_scope("sum_chunks")
def peer_sum_chunks(
    arrays: Sequence[Float[Array, "B C L 256"]], sources: Int[Array, "B n"], axis: str, num_multiprocessors: int | None
) -> list[Float[Array, "B n L 256"]]:
    """This GPU's chunks of both GPUs' rows, added up in float32 and rounded once.

    Args:
      arrays: this GPU's rows, of one shape and dtype.
      sources: `ChunkTables.of_own`.
      axis: the mesh axis of the two.
      num_multiprocessors: of a GPU.
    """
    num_of_row = arrays[0].shape[1]

    def start_load(tile: _ChunkTile, here: Sequence[Any], there: Sequence[Any], start_copies: Callable):
        start_copies(tile.of(here, lax.rem(tile.source, num_of_row)))

    def add(tile: _ChunkTile, there: Sequence[Any], stages: Sequence[Any], theirs: Sequence[Any], arrived):
        @pl.when(tile.source >= num_of_row)
        def add_theirs():
            place = lax.div(tile.source, num_of_row) - 1
            for part, buffer in zip(tile.of(there, place), theirs, strict=True):
                plgpu.copy_gmem_to_smem(part, buffer, arrived)
            plgpu.barrier_wait(arrived)
            for stage, buffer in zip(stages, theirs, strict=True):
                stage[...] = (_load_float32(stage) + _load_float32(buffer)).astype(stage.dtype)
            plgpu.commit_smem()

    return _copy_chunks(
        start_load,
        arrays,
        sources,
        axis,
        num_multiprocessors,
        num_lines=_SUM_LINES,
        num_stages=_SUM_STAGES,
        name="sum_chunks",
        add=add,
    )


def _load_float32(tile: Any) -> jax.Array:
    layout = plgpu.Layout.WG_STRIDED(tile.shape, vec_size=8)
    return plgpu.load(tile, layout=layout).astype(jnp.float32)  # type: ignore[call-arg]  # as JAX 0.10 has it


def _copy_chunks(
    start_load: Callable,
    arrays: Sequence[Array],
    sources: Int[Array, "B chunks"],
    axis: str,
    num_multiprocessors: int | None,
    *,
    num_lines: int,
    num_stages: int,
    name: str,
    add: Callable | None = None,
    num_chunks: Int[Array, " 1"] | None = None,
) -> list[Array]:
    """Runs a kernel that copies the chunks of `sources`, tile by tile.

    Args:
      start_load: (tile, references here and there, start_copies) → starts to load it.
      arrays: read here and on the other GPU.
      sources: of each chunk of the results.
      axis, num_multiprocessors: as for the kernels.
      num_lines: of a tile.
      num_stages: of shared memory.
      name: of the kernel's dumps.
      add: (tile, references there, what was loaded, buffers, their barrier) → adds to what was loaded.
      num_chunks: the first so many of each of the results' rows are copied, `[1]`; None: all.
    """
    assert num_multiprocessors is not None, "the target is a GPU"
    (batch, _, *chunk), dtype, num_arrays = arrays[0].shape, arrays[0].dtype, len(arrays)
    result = jax.ShapeDtypeStruct((batch, sources.shape[1], *chunk), dtype)
    num_programs = _PROGRAMS_OF_A_MULTIPROCESSOR * num_multiprocessors

    def body(sources, num_chunks, *refs):
        arrays, results, refs = refs[:num_arrays], refs[num_arrays : 2 * num_arrays], refs[2 * num_arrays :]
        stages, loaded, *buffers = refs[:num_arrays], *refs[num_arrays:]
        fix_dump_name("_".join((name, *map(str, result.shape))))
        program, pair = lax.axis_index("program"), GpuPair.of(axis, num_programs)
        there = [pair.reference_there(ref) for ref in arrays]
        tiles = _ChunkTiles.of(result.shape, num_lines, None if num_chunks is None else num_chunks[0])
        num_tiles = lax.div(tiles.num_tiles - program + (num_programs - 1), jnp.int32(num_programs))

        def tile_and_slot(i) -> tuple[_ChunkTile, Any]:
            return tiles.tile(program + i * num_programs, sources), lax.rem(i, jnp.int32(num_stages))

        def load(i):
            tile, slot = tile_and_slot(i)

            def start_copies(parts):
                for part, stage in zip(parts, stages, strict=True):
                    plgpu.copy_gmem_to_smem(part, stage.at[slot], loaded.at[slot])

            start_load(tile, arrays, there, start_copies)

        for first in range(num_stages):
            pl.when(first < num_tiles)(functools.partial(load, jnp.int32(first)))

        @pl.loop(0, num_tiles)
        def store(i):
            tile, slot = tile_and_slot(i)
            plgpu.barrier_wait(loaded.at[slot])
            if add is not None:
                add(tile, there, [stage.at[slot] for stage in stages], buffers[:-1], buffers[-1])
            for stage, part in zip(stages, tile.of(results, tile.chunk), strict=True):
                plgpu.copy_smem_to_gmem(stage.at[slot], part, commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            # The tile before has left its stage.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            following = i - 1 + num_stages
            pl.when((i > 0) & (following < num_tiles))(lambda: load(following))

        # What the other GPU's program of this number reads here must stay until it has.
        pair.signal(program)
        pair.wait(program)

    scratch: list[Any] = [plgpu.SMEM((num_stages, num_lines, LINE), dtype)] * num_arrays
    scratch += [plgpu.Barrier(num_arrivals=num_arrays, num_barriers=num_stages)]
    if add is not None:
        scratch += [plgpu.SMEM((num_lines, LINE), dtype)] * num_arrays + [plgpu.Barrier(num_arrivals=num_arrays)]
    return plgpu.kernel(
        body,
        out_type=[result] * num_arrays,
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(),
    )(sources, num_chunks, *arrays)
