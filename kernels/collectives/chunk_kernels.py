"""Kernels that put rows together from chunks of several GPUs' memory, and add up chunks of all.

Which of the other GPUs' chunks are needed is known on the devices only, since documents decide it. A table says it for
each chunk, and nothing else is read from other GPUs. A program copies one tile of a chunk after another to shared
memory, over NVLink where it lies in another GPU's memory, and from there to its place.

Shapes: R GPUs, B batch, n chunks of one GPU, C chunks of a row, L lines of a chunk, each of 256 numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels.collectives.gpu_peers import GpuPeers
from kernels.hopper.begin_kernel import begin_kernel
from kernels.hopper.persistent_matmul import div_rem
from kernels.tracing.number_types import types_of_32_bits

LINE = 256
"""Numbers of a line: the most that one copy can be wide."""
TILE_LINES = 32
"""Lines of a tile. A smaller one divides it."""
# Lines of a tile, and stages of shared memory: for two arrays 96 KiB, and 80 KiB, or 112 KiB of four GPUs.
_GATHER_LINES, _GATHER_STAGES = TILE_LINES, 3
_SUM_LINES, _SUM_STAGES = TILE_LINES // 2, 4
# They fit side by side, and hide each other's waits. A program waits only for the other GPUs' of its number, and only
# at its end, so it doesn't matter how many run at the same time.
_PROGRAMS_OF_A_MULTIPROCESSOR = 2

# To arrays on this GPU, and on each of the others, the next one first.
_References = Sequence[Sequence[Any]]


class _ChunkTile(NamedTuple):
    """A tile of the result.

    Attributes:
      sequence, chunk, lines: where it lies.
    """

    sequence: Any
    chunk: Any
    lines: Any

    def of(self, references: Sequence[Any], chunk) -> list[Any]:
        """References to the same lines of another chunk."""
        return [ref.at[(self.sequence, chunk, self.lines)] for ref in references]


class _ChunkTiles(NamedTuple):
    """How chunks are cut into tiles.

    Attributes:
      num_chunks: the number of each row's first chunks.
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

    def tile(self, number) -> _ChunkTile:
        """A tile by its number.

        Tiles that are copied at the same time are of different chunks, so that what comes over NVLink comes beside
        what doesn't.
        """
        number, chunk = div_rem(number, self.num_chunks)
        sequence, number = div_rem(number, self.of_chunk)
        return _ChunkTile(sequence, chunk, pl.ds(number * self.lines, self.lines))


@jax.named_scope("gather_chunks")
def peer_gather_chunks(
    arrays: Sequence[Float[Array, "B n L 256"]],
    sources: Int[Array, "B C"],
    num_chunks: Int[Array, " 1"],
    axis: str,
    num_multiprocessors: int | None,
    *,
    num_ranks: int,
) -> list[Float[Array, "B C L 256"]]:
    """Rows of all GPUs' chunks.

    Args:
      arrays: this GPU's, of one shape and dtype.
      sources, num_chunks: as `ChunkTables` has them.
      axis: the mesh axis of the GPUs.
      num_multiprocessors: of a GPU.
      num_ranks: R.
    """
    num_own = arrays[0].shape[1]

    def start_load(tile: _ChunkTile, sources: Any, everywhere: _References, start_copies: Callable):
        distance, chunk = div_rem(sources[tile.sequence, tile.chunk], num_own)
        for i, references in enumerate(everywhere):
            pl.when(distance == i)(functools.partial(start_copies, tile.of(references, chunk)))

    return _copy_chunks(
        start_load,
        arrays,
        sources,
        num_ranks,
        axis,
        num_multiprocessors,
        num_lines=_GATHER_LINES,
        num_stages=_GATHER_STAGES,
        name="gather_chunks",
        num_chunks=num_chunks,
    )


@jax.named_scope("sum_chunks")
def peer_sum_chunks(
    arrays: Sequence[Float[Array, "B C L 256"]],
    sources: Int[Array, "B n R"],
    axis: str,
    num_multiprocessors: int | None,
) -> list[Float[Array, "B n L 256"]]:
    """This GPU's chunks of all GPUs' rows, added up in float32 and rounded once.

    Args:
      arrays: this GPU's rows, of one shape and dtype.
      sources: `ChunkTables.of_own`.
      axis: the mesh axis of the GPUs.
      num_multiprocessors: of a GPU.
    """
    num_ranks = sources.shape[2]

    def start_load(tile: _ChunkTile, sources: Any, everywhere: _References, start_copies: Callable):
        start_copies(tile.of(everywhere[0], sources[tile.sequence, tile.chunk, 0]))

    def add(
        tile: _ChunkTile, sources: Any, everywhere: Sequence[Sequence[Any]], stages: Sequence[Any], theirs, arrived
    ):
        places = [sources[tile.sequence, tile.chunk, distance] for distance in range(1, num_ranks)]

        @pl.when(functools.reduce(operator.or_, (place > 0 for place in places)))
        def add_theirs():
            for i, place in enumerate(places):

                @pl.when(place > 0)
                def start_copies(i=i, place=place):
                    for part, buffers in zip(tile.of(everywhere[1 + i], place - 1), theirs, strict=True):
                        plgpu.copy_gmem_to_smem(part, buffers.at[i], arrived.at[i])

                @pl.when(place == 0)
                def add_nothing(i=i):
                    for buffers in theirs:
                        # Of the two zeros, the one that leaves the other one's sign, too.
                        _store(buffers.at[i], jnp.full(buffers.shape[1:], -0.0, jnp.float32))

            for i, place in enumerate(places):
                pl.when(place > 0)(functools.partial(plgpu.barrier_wait, arrived.at[i]))
            for stage, buffers in zip(stages, theirs, strict=True):
                parts = (buffers.at[i] for i in range(num_ranks - 1))
                _store(stage, sum(map(_load_float32, parts), _load_float32(stage)))
            plgpu.commit_smem()

    return _copy_chunks(
        start_load,
        arrays,
        sources,
        num_ranks,
        axis,
        num_multiprocessors,
        num_lines=_SUM_LINES,
        num_stages=_SUM_STAGES,
        name="sum_chunks",
        add=add,
    )


def _store(tile: Any, numbers: jax.Array) -> None:
    tile[...] = plgpu.layout_cast(numbers, _layout(tile.shape)).astype(tile.dtype)


def _layout(shape: tuple[int, ...]) -> Any:
    return plgpu.Layout.WG_STRIDED(shape, vec_size=8)


def _load_float32(tile: Any) -> jax.Array:
    layout = _layout(tile.shape)
    return plgpu.load(tile, layout=layout).astype(jnp.float32)  # type: ignore[call-arg]  # as JAX 0.10 has it


@types_of_32_bits()
def _copy_chunks(
    start_load: Callable,
    arrays: Sequence[Array],
    sources: Int[Array, "B chunks *R"],
    num_ranks: int,
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
      start_load: (tile, sources, references to the arrays, start_copies) → starts to load it.
      arrays: read here and on the other GPUs.
      sources: of each chunk of the results.
      num_ranks: R.
      axis, num_multiprocessors: as for the kernels.
      num_lines: of a tile.
      num_stages: of shared memory.
      name: of the kernel, in profilers and dumps.
      add: (tile, sources, references to the arrays, what was loaded, buffers, their barriers) → adds the other GPUs'.
      num_chunks: the number of the first chunks of the results' rows that are copied, `[1]`; None: all.
    """
    assert num_multiprocessors is not None, "the target is a GPU"
    (batch, _, *chunk), dtype, num_arrays = arrays[0].shape, arrays[0].dtype, len(arrays)
    result = jax.ShapeDtypeStruct((batch, sources.shape[1], *chunk), dtype)
    num_programs = _PROGRAMS_OF_A_MULTIPROCESSOR * num_multiprocessors

    def body(sources, num_chunks, *refs):
        arrays, results, refs = refs[:num_arrays], refs[num_arrays : 2 * num_arrays], refs[2 * num_arrays :]
        stages, loaded, *buffers = refs[:num_arrays], *refs[num_arrays:]
        begin_kernel(name, result)
        program, peers = lax.axis_index("program"), GpuPeers.of(axis, num_programs, num_ranks)
        everywhere = [arrays, *([peers.reference_there(ref, distance) for ref in arrays] for distance in peers.others)]
        tiles = _ChunkTiles.of(result.shape, num_lines, None if num_chunks is None else num_chunks[0])
        num_tiles = lax.div(tiles.num_tiles - program + (num_programs - 1), jnp.int32(num_programs))

        def tile_and_slot(i) -> tuple[_ChunkTile, Any]:
            return tiles.tile(program + i * num_programs), lax.rem(i, jnp.int32(num_stages))

        def load(i):
            tile, slot = tile_and_slot(i)

            def start_copies(parts):
                for part, stage in zip(parts, stages, strict=True):
                    plgpu.copy_gmem_to_smem(part, stage.at[slot], loaded.at[slot])

            start_load(tile, sources, everywhere, start_copies)

        for first in range(num_stages):
            pl.when(first < num_tiles)(functools.partial(load, jnp.int32(first)))

        @pl.loop(0, num_tiles)
        def store(i):
            tile, slot = tile_and_slot(i)
            plgpu.barrier_wait(loaded.at[slot])
            if add is not None:
                add(tile, sources, everywhere, [stage.at[slot] for stage in stages], buffers[:-1], buffers[-1])
            for stage, part in zip(stages, tile.of(results, tile.chunk), strict=True):
                plgpu.copy_smem_to_gmem(stage.at[slot], part, commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            # The tile before has left its stage.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            following = i - 1 + num_stages
            pl.when((i > 0) & (following < num_tiles))(lambda: load(following))

        # What the other GPUs' programs of this number read here must stay until they have.
        for distance in peers.others:
            peers.signal(program, distance)
        peers.wait(program, len(peers.others))

    scratch: list[Any] = [plgpu.SMEM((num_stages, num_lines, LINE), dtype)] * num_arrays
    scratch += [plgpu.Barrier(num_arrivals=num_arrays, num_barriers=num_stages)]
    if add is not None:
        scratch += [plgpu.SMEM((num_ranks - 1, num_lines, LINE), dtype)] * num_arrays
        scratch += [plgpu.Barrier(num_arrivals=num_arrays, num_barriers=num_ranks - 1)]
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=[result] * num_arrays,
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(),
    )(sources, num_chunks, *arrays)
