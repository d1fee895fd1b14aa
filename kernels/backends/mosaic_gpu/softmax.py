"""Softmax over tiles that come one after another, which looks for a maximum only where it must.

Weights are relative to a reference, lest they overflow. Online softmax takes the highest logit so far, and whenever
that rises, all sums shrink. But no weight is less exact for a reference some powers of two below the highest logit. So
a tile's weights are first made with the reference as it is, and if they sum up to little, which is nearly always so
after the first tiles, that was all: no maximum, no word between the threads that share a row, nothing to shrink. Only
else the tile's maximum becomes the reference, and its weights are made again.

Each of the four threads that share a row sums up its own weights; their sums meet when the row is done.

Sources: online softmax (arXiv:1805.02867). FlashAttention-4 (github.com/Dao-AILab/flash-attention, flash_attn/cute)
looks for each tile's maximum, but shrinks sums only where it rose far.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm
from jaxlib.mlir.dialects import vector as vectors
from jaxtyping import Array, Bool, Float

from kernels.backends.mosaic_gpu.memory import COLUMNS_OF_A_THREAD, ROWS, ROWS_OF_A_THREAD, spread

# Of a thread's weights in a tile: no weight is higher, and float16 ends at 2¹⁶.
_HIGHEST_SUM = 2.0**10
# Less than any logit, but finite. Where a row has seen no allowed pair, exp2(−inf − it) = 0, and its first allowed one
# has an infinite weight, so that it is looked for.
_INITIAL_REFERENCE = -1e30

_COLUMN = plgpu.Layout.WGMMA.reduce(1)
_ALL_LANES = 0xFFFFFFFF


class Sums(NamedTuple):
    """Of rows so far.

    Attributes:
      reference: what weights are relative to, in units of log₂.
      shares: of the sums of weights, a thread's share: see `row_sums`.
    """

    reference: Float[Array, " rows"]
    shares: Float[Array, " rows"]


class Weights(NamedTuple):
    """Of a tile.

    Attributes:
      weights: in the matmul's dtype.
      sums: of the rows, with this tile's.
      shrink: by what all that was summed up before the tile shrinks.
      shrinks: whether it does, in any of the rows of a warp.
    """

    weights: Float[Array, "rows kv"]
    sums: Sums
    shrink: Float[Array, " rows"]
    shrinks: Bool[Array, ""]


def weigh_first(
    logits: Float[Array, "rows kv"], *, to_log2: float, dtype, interpreted: bool
) -> tuple[Float[Array, "rows kv"], Sums]:
    """Weights of the logits of the rows' first tile, whose maximum becomes the reference, and their sums.

    Args:
      logits, to_log2, dtype, interpreted: as of `weigh`.
    """
    nothing = Sums(_column(_INITIAL_REFERENCE), _column(0.0))
    return _look(logits, nothing, to_log2, dtype, interpreted=interpreted)[:2]


def weigh(logits: Float[Array, "rows kv"], sums: Sums, *, to_log2: float, dtype, interpreted: bool) -> Weights:
    """Weights of the logits of another tile, and the sums with them.

    Args:
      logits: −inf where a pair may not attend.
      to_log2: the factor that brings them to units of log₂.
      dtype: of the weights.
      interpreted: whether Pallas's interpreter runs this, which knows no threads: a row has one share.
    """
    weights, shares, is_high = _make(logits, sums.reference, to_log2, interpreted=interpreted)
    same = (weights.astype(dtype), Sums(sums.reference, sums.shares + shares), _column(1.0))
    # A warp branches by itself, so that nothing in there may wait for another.
    weights, new_sums, shrink = jax.lax.cond(
        is_high, lambda: _look(logits, sums, to_log2, dtype, interpreted=interpreted), lambda: same
    )
    return Weights(weights, new_sums, shrink, is_high)


def _look(logits, sums: Sums, to_log2: float, dtype, *, interpreted: bool):
    """Weights relative to the tile's maximum or the reference, the sums with them, and by what those before shrink."""
    reference = jnp.maximum(sums.reference, logits.max(axis=1) * to_log2)
    shrink = jnp.exp2(sums.reference - reference)
    weights, shares, _ = _make(logits, reference, to_log2, interpreted=interpreted)
    return weights.astype(dtype), Sums(reference, sums.shares * shrink + shares), shrink


def _make(logits, reference, to_log2: float, *, interpreted: bool):
    """Weights in float32, each thread's share of their rows' sums, and whether one of a warp's is high."""
    # In these units exp2 makes a weight with one multiply-add.
    weights = jnp.exp2(logits * to_log2 - spread(reference, logits.shape, rows=True))
    return weights, *_add_up(weights, interpreted=interpreted)


def row_sums(shares: Float[Array, " rows"], *, interpreted: bool) -> Float[Array, " rows"]:
    """The rows' sums, of the shares of the threads that share a row."""
    if interpreted:
        return shares

    @plgpu.inline_mgpu(arg_types=(_COLUMN,), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, _COLUMN))
    def join(_, shares: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = list(shares.registers.flat)
        for distance in (1, 2):  # Four threads in a row share a row.
            registers = [arith.addf(register, utils.shfl_bfly(register, distance)) for register in registers]
        return _fragments(registers)

    return join(shares)


def _add_up(weights: Float[Array, "rows kv"], *, interpreted: bool) -> tuple[Float[Array, " rows"], Bool[Array, ""]]:
    """Each thread's share of the rows' sums, and whether one of a warp's is high."""
    if interpreted:
        shares = weights.sum(axis=1)
        return shares, (shares > _HIGHEST_SUM).any()
    result = (
        plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, _COLUMN),
        plgpu.ShapeDtypeStruct((), jnp.bool_, _COLUMN),  # of which a scalar has none
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def add_up(_, weights: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
        rows = weights.registers.reshape(-1, ROWS_OF_A_THREAD).T
        shares = [
            _sum([vectors.extract(pair, [], [i]) for pair in row for i in range(COLUMNS_OF_A_THREAD)]) for row in rows
        ]
        highest = mgpu.c(_HIGHEST_SUM, ir.F32Type.get())
        is_high = arith.ori(*(arith.cmpf(arith.CmpFPredicate.OGT, share, highest) for share in shares))
        is_high = nvvm.vote_sync(mgpu.c(_ALL_LANES, ir.IntegerType.get_signless(32)), is_high, "any")
        one = ir.VectorType.get((1,), ir.F32Type.get())
        return (
            _fragments([vectors.broadcast(one, share) for share in shares]),
            mgpu.FragmentedArray.splat(is_high, (), is_signed=False),
        )

    return add_up(weights)


def _sum(numbers: list[ir.Value]) -> ir.Value:
    # Four sums at a time: an addition takes some cycles, and the next one to the same sum waits for it.
    sums = numbers[:4]
    for i, number in enumerate(numbers[4:]):
        sums[i % 4] = arith.addf(sums[i % 4], number)
    return arith.addf(arith.addf(sums[0], sums[1]), arith.addf(sums[2], sums[3]))


def _fragments(registers: list[ir.Value]) -> mgpu.FragmentedArray:
    """A number for each row, of the registers that a thread holds of it."""
    layout = _COLUMN.to_mgpu()
    shape = layout.registers_shape((ROWS,))
    return mgpu.FragmentedArray(_registers=np.array(registers, object).reshape(shape), _layout=layout, _is_signed=None)


def _column(number: float) -> Float[Array, " rows"]:
    return plgpu.layout_cast(jnp.full((ROWS,), number, jnp.float32), _COLUMN)
