"""Exponentials of logits, in place of the logits: a matmul that computes them before it stores, on Hopper GPUs.

A softmax over a vocabulary reads float32 logits again for their sums, and again for their gradient. If each token's
exponentials are relative to a number that is known before the matmul, they and their sums can be had from the sums of
products where they are computed. They leave in 16 bits, which is what the gradient's matmuls take.

Dimensions: C tokens, D width, V vocabulary; D and V are multiples of 64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.hopper import persistent_matmul
from kernels.hopper.persistent_matmul import (
    BLOCK_DEPTH,
    BLOCK_ROWS,
    STORED_COLUMNS,
    MatmulPhase,
    TileOperands,
    div_rem,
    launch_on,
    multiply_rows_by,
    place_tile,
    stages_of_rows,
    store_parts,
    tile_columns,
)
from kernels.hopper.registers import WGMMA_ROWS, load_vector, spread
from kernels.hopper.softmax import LOG2_E
from kernels.tracing.target import Target

_PAIR_SIZE = 2  # programs that share columns of the head, each of which loads a part of them for both


@dataclass(frozen=True)
class ExpLogits:
    """The kernel, for a device that it serves (`unsupported_reason`).

    Attributes:
      target: the device.
      interpret: whether Pallas's interpreter runs it, on any device: for tests.
    """

    target: Target
    interpret: bool = False

    def __call__(
        self,
        hidden: Float[Array, "C D"],
        head: Float[Array, "D V"],
        shifts: Float[Array, " C"],
        *,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "C V"], Float[Array, " C"]]:
        """Exponentials of logits, and their sums.

        Args:
          hidden: bfloat16.
          head: bfloat16.
          shifts: float32, of each token; its exponentials are exp(logit - shift).
          soft_cap: logits become cap * tanh(logits / cap), and exponentials are multiplied by that function's slope.
            None: logits as they are.

        Returns:
          Exponentials in bfloat16, and in float32 their sums over the vocabulary, as they were before they were rounded
          and multiplied by a slope. A sum that float32 doesn't hold is infinite, and its exponentials may be anything.

        Raises:
          ValueError: a device, dtype, width or vocabulary that the kernel doesn't take.
        """
        num_tokens, width = hidden.shape
        reason = unsupported_reason(hidden.dtype, width, head.shape[1], self.target, interpret=self.interpret)
        if reason is not None:
            raise ValueError(f"exponentials of logits can't be computed by the kernel: it {reason}; compute the logits")
        padding = -num_tokens % (_PAIR_SIZE * BLOCK_ROWS)
        hidden, shifts = jnp.pad(hidden, [(0, padding), (0, 0)]), jnp.pad(shifts, (0, padding))
        exponentials, sums = _run(hidden, head, shifts * LOG2_E, soft_cap, self)
        return exponentials[:num_tokens], sums.sum(0)[:num_tokens]


def unsupported_reason(
    dtype: jnp.dtype, width: int, vocab_size: int, target: Target, *, interpret: bool = False
) -> str | None:
    """Why the kernel can't serve such a head on such a device, or None if it can."""
    dtypes, features = [jnp.bfloat16], (width, vocab_size)  # float16 ends at 65,504
    return persistent_matmul.unsupported_reason(dtype, dtypes, features, target, interpret=interpret)


def _run(hidden, head, log2_shifts, soft_cap: float | None, kernel: ExpLogits) -> tuple[Array, Array]:
    num_tokens, vocab_size = hidden.shape[0], head.shape[1]
    columns = tile_columns(vocab_size)
    num_down, num_across = num_tokens // (_PAIR_SIZE * BLOCK_ROWS), vocab_size // columns

    def make_phases(gmem) -> list[MatmulPhase]:
        hidden, head, log2_shifts, exponentials, sums = gmem

        def place(tile) -> tuple[Any, Any]:
            """A tile's first row, and how far across the vocabulary it lies."""
            pair, of_pair = div_rem(tile, _PAIR_SIZE)
            down, across = place_tile(pair, num_down, num_across)
            return (_PAIR_SIZE * down + of_pair) * BLOCK_ROWS, across

        def operands(tile) -> TileOperands:
            first_row, across = place(tile)

            def along(step):
                return pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)

            return TileOperands(
                BLOCK_ROWS,
                [hidden.shape[1] // BLOCK_DEPTH],
                [lambda step: hidden.at[pl.ds(first_row, BLOCK_ROWS), along(step)]],
                [lambda step: [head.at[along(step), pl.ds(across * columns, columns)]]],
                shares_right=True,
            )

        def store(products, tile, warpgroup, buffers):
            first_row, across = place(tile)
            own = pl.ds(first_row + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
            shifts = load_vector(log2_shifts.at[own], rows=True, shared=False)
            part_sums = []

            def start_copy(column, buffer):
                here = exponentials.at[own, pl.ds(across * columns + column, STORED_COLUMNS)]
                plgpu.copy_smem_to_gmem(buffer, here)

            def parts() -> Iterator[tuple[Any, Any]]:
                for column in range(0, columns, STORED_COLUMNS):
                    logits = products[0][:, column : column + STORED_COLUMNS]
                    if soft_cap is not None:
                        # The hardware's tanh has errors of 2⁻¹¹. Exponentials are to tell a target's from 1.
                        below = 1 / (1 + jnp.exp2(logits * (2 * LOG2_E / soft_cap)))
                        logits = soft_cap - (2 * soft_cap) * below
                    part = jnp.exp2(logits * LOG2_E - spread(shifts, logits.shape, rows=True))
                    part_sums.append(part.sum(axis=1))
                    if soft_cap is not None:
                        part *= 4 * (below - below * below)
                    yield part, functools.partial(start_copy, column)

            store_parts(parts(), buffers)
            sums.at[across, own][...] = functools.reduce(jnp.add, part_sums)

        num_tiles = _PAIR_SIZE * num_down * num_across
        return [MatmulPhase(num_tiles, operands, multiply_rows_by(transpose=False), store)]

    exponentials, sums = launch_on(
        kernel.target,
        make_phases,
        (hidden, head, log2_shifts),
        [
            jax.ShapeDtypeStruct((num_tokens, vocab_size), hidden.dtype),
            jax.ShapeDtypeStruct((num_across, num_tokens), jnp.float32),
        ],
        stages_of_rows(columns, transpose=False),
        columns,
        interpret=kernel.interpret,
        name="exp_logits",
        pair_size=_PAIR_SIZE,
    )
    return exponentials, sums
