"""The Hopper kernel of rows' copies, in Pallas Mosaic GPU: each row goes to the places of all its copies.

The copy engine reads a row once and writes it whole. XLA's lookups read it anew for each of its copies.

Shapes: N rows of the caller's, K copies of each, R places, W features.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.experts.choice import GroupedMatmulChoice
from kernels.experts.row_groups import RowGroups
from kernels.hopper.begin_kernel import begin_kernel
from kernels.hopper.persistent_matmul import BLOCK_DEPTH
from kernels.tracing.number_types import types_of_32_bits
from kernels.tracing.slice_fusion import without_slice_fusion

_LINES = (256, 192, 128, 64)  # numbers: the most that one copy can be wide, and that divide a row
_MOST_LINES = 256  # of one copy
_ZEROED_LINES = 8  # of which each thread has a whole number of vectors
_NUM_STAGES = 3
_STAGE_BYTES, _STAGE_COPIES = 32 * 1024, 64  # of a stage of several rows, at most
_LARGEST_ROW_BYTES = 48 * 1024  # of which the stages and the zeros fit into shared memory
# They fit side by side, and hide each other's waits.
_PROGRAMS_OF_A_MULTIPROCESSOR = 2
_INTERPRETED_PROGRAMS = 2


def serves(rows: Float[Array, "N W"]) -> bool:
    """True if the kernel can copy such rows, which grouped matmuls can multiply."""
    width = rows.shape[1]
    return width * rows.dtype.itemsize <= _LARGEST_ROW_BYTES and width // _line(width) <= _MOST_LINES


def _line(width: int) -> int:
    return next(line for line in _LINES if width % line == 0)


@types_of_32_bits()
def copy_rows(
    rows: Float[Array, "N W"], groups: RowGroups, num_copies: int, choice: GroupedMatmulChoice
) -> Float[Array, "R W"]:
    """Each row in its `num_copies` places.

    Zeros pad a group to the end of the steps of `multiply_groups`. The places after them aren't written.
    """
    num_rows, width = rows.shape
    line = _line(width)
    lines = width // line
    tile_rows = min(_STAGE_BYTES // (width * rows.dtype.itemsize), _STAGE_COPIES // num_copies)
    tile_rows = math.gcd(num_rows, 1 << max(tile_rows, 1).bit_length() - 1)
    starts = jnp.cumsum(groups.sizes) - groups.sizes
    ends = starts + groups.counts
    padded_ends = starts + pl.cdiv(groups.counts, BLOCK_DEPTH) * BLOCK_DEPTH
    if choice.interpret:
        num_programs = _INTERPRETED_PROGRAMS
    else:
        assert choice.target.num_multiprocessors is not None, f"{choice.target} is a GPU"
        num_programs = _PROGRAMS_OF_A_MULTIPROCESSOR * choice.target.num_multiprocessors
    result = jax.ShapeDtypeStruct((groups.sources.size, lines, line), rows.dtype)

    def body(rows, places, ends, padded_ends, copies, stages, zeros, loaded):
        if not choice.interpret:
            begin_kernel("copy_rows", result)
        program = lax.axis_index("program")

        def num_own(number: int):
            """This program's share of `number` tiles or groups."""
            return lax.div(number - program + (num_programs - 1), jnp.int32(num_programs))

        zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
        plgpu.commit_smem()

        @pl.loop(0, num_own(ends.shape[0]))
        def pad(i):
            group = program + i * num_programs

            @pl.loop(ends[group], padded_ends[group])
            def _(place):
                plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, lines)], copies.at[place], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        num_tiles = num_own(num_rows // tile_rows)

        def load(i):
            slot, first = lax.rem(i, jnp.int32(_NUM_STAGES)), (program + i * num_programs) * tile_rows
            plgpu.copy_gmem_to_smem(rows.at[pl.ds(first, tile_rows)], stages.at[slot], loaded.at[slot])

        for first in range(_NUM_STAGES):
            pl.when(first < num_tiles)(functools.partial(load, jnp.int32(first)))

        @pl.loop(0, num_tiles)
        def store(i):
            slot, first = lax.rem(i, jnp.int32(_NUM_STAGES)), (program + i * num_programs) * (tile_rows * num_copies)
            own_places = [places[first + copy] for copy in range(tile_rows * num_copies)]
            plgpu.barrier_wait(loaded.at[slot])
            for copy, place in enumerate(own_places):
                plgpu.copy_smem_to_gmem(stages.at[slot, copy // num_copies], copies.at[place], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            # The tile before has left its stage.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            following = i - 1 + _NUM_STAGES
            pl.when((i > 0) & (following < num_tiles))(lambda: load(following))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    body.__name__ = "copy_rows"
    copies = plgpu.kernel(
        body,
        out_type=result,
        scratch_types=[
            plgpu.SMEM((_NUM_STAGES, tile_rows, lines, line), rows.dtype),
            plgpu.SMEM((pl.cdiv(lines, _ZEROED_LINES) * _ZEROED_LINES, line), rows.dtype),
            plgpu.Barrier(num_barriers=_NUM_STAGES),
        ],
        grid=(num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(),
        # New in JAX 0.11.
        interpret=plgpu.InterpretGPUParams() if choice.interpret else None,  # type: ignore[attr-defined]
    )(rows.reshape(num_rows, lines, line), groups.places, ends, padded_ends)
    return without_slice_fusion(copies)[0].reshape(-1, width)
