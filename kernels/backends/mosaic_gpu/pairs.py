"""Which pairs of a PARTIAL tile may attend, evaluated within a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Int

from kernels.backends.mosaic_gpu.memory import (
    COLUMNS_OF_A_THREAD,
    ROWS_OF_A_THREAD,
    THREADS_OF_A_ROW,
    load_vector,
    spread,
)
from kernels.call import AttentionCall, AttentionInputs

_LAYOUT = plgpu.Layout.WGMMA


Side = Literal["query", "key_value"]


class Tokens(NamedTuple):
    """What is known of each token on the device only, `[B, L]` padded to whole tiles; None where it wasn't given.

    The same tuple holds the arrays outside of a kernel and inside the references to them, or what loads a tile's.
    """

    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    query_positions: Any = None
    key_value_positions: Any = None

    def given(self, side: Side | Literal[""] = "") -> dict[str, Any]:
        """What was given, or what was given of one side ("query" or "key_value"), by name."""
        return {name: x for name, x in self._asdict().items() if x is not None and name.startswith(side)}

    @staticmethod
    def of(inputs: AttentionInputs, block_q: int, block_kv: int) -> Tokens:
        """The ids and positions of a call; the last tile is filled by repeating the last token's."""

        def padded(tokens: Int[Array, "B L"] | None, block: int):
            if tokens is None:
                return None
            return jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % block)], mode="edge")

        return Tokens(
            padded(inputs.query_segment_ids, block_q),
            padded(inputs.key_value_segment_ids, block_kv),
            padded(inputs.query_positions, block_q),
            padded(inputs.key_value_positions, block_kv),
        )


def keep_allowed(logits: jax.Array, is_partial, allowed: Callable[[tuple[int, int]], jax.Array]) -> jax.Array:
    """Sets the logits of pairs that may not attend to −inf; evaluates the mask in PARTIAL tiles only.

    Args:
      logits: of a tile, in registers.
      is_partial: whether the tile is PARTIAL: a traced scalar, or a bool where that is known.
      allowed: (shape) → which pairs may attend.
    """

    def mask(logits):
        return jnp.where(allowed(logits.shape), logits, -jnp.inf)

    if isinstance(is_partial, bool):
        return mask(logits) if is_partial else logits
    return jax.lax.cond(is_partial, mask, lambda logits: logits, logits)


def token_memory(tokens: Tokens, streamed: Side, num_stages: int, block: int) -> dict[str, Any]:
    """Shared memory for what is given of the tokens that stream past, `token_smem`; nothing for nothing.

    Args:
      tokens: the arrays.
      streamed: the side whose tiles stream past.
      num_stages, block: tiles in memory, and tokens in a tile.
    """
    given = tokens.given(streamed)
    return {"token_smem": plgpu.SMEM((len(given), num_stages, block), jnp.int32)} if given else {}


def copy_tokens(tokens: Tokens, memory, streamed: Side, where, slot, ready) -> None:
    """Starts to copy a tile's tokens to their slot; each array arrives at the barrier once.

    Args:
      tokens: references to the arrays.
      memory: `token_smem`; None if nothing is given.
      where: (element of the batch, tokens).
    """
    for i, ref in enumerate(tokens.given(streamed).values()):
        plgpu.copy_gmem_to_smem(ref.at[where], memory.at[i, slot], ready)


def resident_tokens(tokens: Tokens, streamed: Side, where) -> dict[str, jax.Array]:
    """Loads what is given of the tokens of a warpgroup's rows: once, since they stay while tiles stream past.

    Args:
      tokens: references to the arrays.
      streamed: the side whose tiles stream past: not the rows.
      where: (element of the batch, the rows' tokens).
    """
    side: Side = "key_value" if streamed == "query" else "query"
    return {name: load_vector(ref.at[where], rows=True, shared=False) for name, ref in tokens.given(side).items()}


def tile_tokens(tokens: Tokens, memory, streamed: Side, *, resident: dict[str, jax.Array], slot) -> Tokens:
    """Of one tile, rows and columns: a function (shape) of each that is given, which spreads it over the tile.

    Args:
      tokens: references to the arrays.
      memory: `token_smem`; None if nothing is given.
      streamed: the side whose tiles stream past: the tile's columns.
      resident: the rows' (`resident_tokens`).
      slot: the columns' slot.
    """

    def spread_columns(i: int, shape):
        return spread(load_vector(memory.at[i, slot], rows=False), shape, rows=False)

    rows = {name: functools.partial(spread, vector, rows=True) for name, vector in resident.items()}
    columns = {name: functools.partial(spread_columns, i) for i, name in enumerate(tokens.given(streamed))}
    return Tokens(**rows, **columns)


def allowed_pairs(
    call: AttentionCall,
    tokens: Tokens,
    q_first,
    kv_first,
    shape: tuple[int, int],
    *,
    kv_padded: bool,
    transposed: bool,
    interpreted: bool,
) -> jax.Array:
    """Which pairs of a tile may attend.

    Args:
      call: its mask, lengths and what is given of tokens.
      tokens: loaders of the tile's own (`tile_tokens`).
      q_first, kv_first: index of the tile's first query and first key.
      shape: (queries, keys) of the tile, or (keys, queries) if transposed.
      kv_padded: whether keys past the call's last one may be in the tile.
      transposed: whether keys are the rows.
      interpreted: whether Pallas's interpreter runs this, which knows no threads.

    Returns:
      bool of `shape`, in the layout of an accumulator.
    """
    row_first, column_first = (kv_first, q_first) if transposed else (q_first, kv_first)
    rows = row_first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_LAYOUT)
    columns = _column_indices(column_first, shape, interpreted=interpreted)
    q_index, kv_index = (columns, rows) if transposed else (rows, columns)
    if call.has_positions:
        q_pos = tokens.query_positions(shape)
        kv_pos = tokens.key_value_positions(shape)
    else:
        q_pos, kv_pos = q_index, kv_index
    allowed = call.mask(q_pos, kv_pos)
    if call.has_segment_ids:
        allowed &= tokens.query_segment_ids(shape) == tokens.key_value_segment_ids(shape)
    if kv_padded:
        allowed &= kv_index < call.kv_len
    return allowed


def _column_indices(first, shape: tuple[int, int], *, interpreted: bool) -> Int[Array, "rows columns"]:
    """The index of each element's column, from the tile's first: a thread's own first one, and constants after it.

    Of an iota, whose terms but for the tile's first are those of all tiles, the compiler would make a register for each
    column, to keep, or to spill, for all tiles.
    """
    if interpreted:
        return first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)
    rows = _LAYOUT.reduce(1)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape[:1], jnp.int32, rows))
    def own_first(_) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        place = arith.remui(utils.thread_idx(), mgpu.c(THREADS_OF_A_ROW, i32))
        return mgpu.FragmentedArray.splat(
            arith.muli(place, mgpu.c(COLUMNS_OF_A_THREAD, i32)), shape[:1], rows.to_mgpu(), is_signed=True
        )

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, _LAYOUT))
    def distances(_) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        layout, pair = _LAYOUT.to_mgpu(), ir.VectorType.get((COLUMNS_OF_A_THREAD,), i32)
        registers = np.empty(layout.registers_shape(shape), object)
        for i in range(registers.size):
            distance = i // ROWS_OF_A_THREAD * COLUMNS_OF_A_THREAD * THREADS_OF_A_ROW
            numbers = [ir.IntegerAttr.get(i32, distance + n) for n in range(COLUMNS_OF_A_THREAD)]
            value = ir.DenseElementsAttr.get(numbers, type=pair)
            # jaxlib's stub knows constants that are numbers only.
            registers.flat[i] = arith.constant(pair, value)  # type: ignore[call-arg,arg-type]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return spread(first + own_first(), shape, rows=True) + distances()
