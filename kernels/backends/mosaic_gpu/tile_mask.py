"""Mask, documents, bounds and padding of PARTIAL tiles, evaluated within a kernel, and the probabilities under them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.hopper.registers import load_vector, spread
from kernels.hopper.softmax import LOG2_E
from kernels.masks.bounds import OF_QUERIES, is_within

Side = Literal["query", "key_value"]


def log2_scale(call: AttentionCall) -> float:
    """The factor that converts logits to units of log₂; with a soft cap: tanh of the capped logits."""
    return LOG2_E * (call.scale if call.logits_soft_cap is None else call.logits_soft_cap)


class TokenArrays(NamedTuple):
    """Segment ids, positions and bounds `[B, L]`, padded to whole tiles; None where they aren't given.

    Within a kernel the same tuple holds references to the arrays.
    """

    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    query_positions: Any = None
    key_value_positions: Any = None
    k_start: Any = None
    k_end: Any = None
    q_start: Any = None
    q_end: Any = None

    def given(self, side: Side) -> dict[str, Any]:
        """The given arrays of one side, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None and side_of(name) == side}

    @staticmethod
    def of(inputs: AttentionInputs, block_q: int, block_kv: int) -> TokenArrays:
        """The arrays of a call. The last token's number fills the last tile."""

        def padded(name: str, tokens: Int[Array, "B L"] | None):
            if tokens is None:
                return None
            block = block_q if side_of(name) == "query" else block_kv
            return jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % block)], mode="edge")

        given = inputs._asdict() | ({} if inputs.bounds is None else inputs.bounds._asdict())
        return TokenArrays(*(padded(name, given.get(name)) for name in TokenArrays._fields))

    def copy(self, memory, side: Side, where, slot, full) -> None:
        """Starts to copy the tokens `where`, (batch element, tokens), to their stage of `token_memory`.

        Each array arrives at the barrier `full` once.
        """
        for i, ref in enumerate(self.given(side).values()):
            plgpu.copy_gmem_to_smem(ref.at[where], memory.at[i, slot], full)


def side_of(name: str) -> Side:
    """The side that an array of tokens belongs to."""
    return "query" if name.startswith("query") or name in OF_QUERIES else "key_value"


def num_token_arrays(call: AttentionCall, side: Side) -> int:
    """Arrays that `TokenArrays` holds of a side."""
    return call.has_segment_ids + call.has_positions + sum(side_of(name) == side for name in call.bounds)


def token_memory(call: AttentionCall, side: Side, num_stages: int, block: int, *, numbered: bool = False) -> Any:
    """Shared memory for the tokens of the tiles in a ring, and where `numbered` their numbers; None for neither."""
    num_arrays = num_token_arrays(call, side) + numbered
    return plgpu.SMEM((num_arrays, num_stages, block), jnp.int32) if num_arrays else None


def counts_up(call: AttentionCall, num_tokens: int) -> bool:
    """True if the first token's position gives those of `num_tokens` tokens, the rows or the columns of a tile."""
    return call.position_run % num_tokens == 0


class TileMask(NamedTuple):
    """The mask of a warpgroup's tiles. Its rows stay the same, and its columns are those of one tile after another."""

    context: Any  # of the pass
    streamed: Side  # of the columns: "key_value", or "query" for transposed tiles
    row_first: Any  # index of the warpgroup's first query, or first key
    block_kv: int  # keys past the last one, up to a multiple of it, are zeros
    row_tokens: dict[str, jax.Array]  # the rows' own tokens, by name; the first one's position where they count up

    @staticmethod
    def load(context: Any, streamed: Side, batch, rows, block_kv: int) -> TileMask:
        """The mask of some rows, `pl.ds(first, length)` of a batch element. Loads their tokens from global memory."""
        given = context.gmem.tokens.given("key_value" if streamed == "query" else "query")

        def load(name: str, ref):
            if name.endswith("positions") and counts_up(context.call, rows.size):
                return ref[batch, rows.start]
            return load_vector(ref.at[batch, rows], rows=True, shared=False)

        row_tokens = {name: load(name, ref) for name, ref in given.items()}
        return TileMask(context, streamed, rows.start, block_kv, row_tokens)

    def apply(self, logits, is_partial, column_first, slot) -> jax.Array:
        """Sets the logits of pairs that may not attend to −inf. Evaluates the mask in PARTIAL tiles only.

        Args:
          is_partial: whether the tile is PARTIAL: a bool or a traced one.
          column_first: index of the tile's first column among the keys, or among the queries.
          slot: the stage that holds the columns' tokens.
        """

        def masked(logits):
            return jnp.where(self._allowed(logits.shape, column_first, slot), logits, -jnp.inf)

        if isinstance(is_partial, bool):
            return masked(logits) if is_partial else logits
        return jax.lax.cond(is_partial, masked, lambda logits: logits, logits)

    def probabilities(self, logits, lse, is_partial, column_first, slot) -> tuple[jax.Array, jax.Array | None]:
        """Probabilities of a tile, and the soft cap's derivative at its logits (None without a cap). See `apply`.

        `lse` is in units of log₂; None if it was subtracted from the logits before.
        """
        call, slope = self.context.call, None
        if call.logits_soft_cap is not None:
            logits = jnp.tanh(logits * (call.scale / call.logits_soft_cap))
            slope = 1 - logits * logits
        exponent = self.apply(logits, is_partial, column_first, slot) * log2_scale(call)
        if lse is not None:
            exponent = exponent - spread(lse, logits.shape, rows=self.streamed == "key_value")
        return jnp.exp2(exponent), slope

    def _allowed(self, shape: tuple[int, int], column_first, slot) -> jax.Array:
        """Which pairs of a tile may attend, in the layout of an accumulator."""
        call: AttentionCall = self.context.call
        rows = self.row_first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        columns = self.context.machine.column_indices(column_first, shape)
        q_index, kv_index = (columns, rows) if self.streamed == "query" else (rows, columns)
        q_pos, kv_pos = q_index, kv_index
        if call.has_positions:
            q_pos, kv_pos = (self._positions(side, shape, slot) for side in get_args(Side))
        allowed = call.mask(q_pos, kv_pos)
        if call.has_segment_ids:
            q_ids = self._tokens_of_tile("query_segment_ids", shape, slot)
            allowed &= q_ids == self._tokens_of_tile("key_value_segment_ids", shape, slot)
        for name in call.bounds:
            index = kv_index if name in OF_QUERIES else q_index
            allowed &= is_within(name, index, self._tokens_of_tile(name, shape, slot))
        if call.kv_len % self.block_kv:
            allowed &= kv_index < call.kv_len
        return allowed

    def _positions(self, side: Side, shape: tuple[int, int], slot) -> jax.Array:
        """Positions of the tile's rows or columns, as a matrix."""
        name = f"{side}_positions"
        if side == self.streamed:
            if not counts_up(self.context.call, shape[1]):
                return self._tokens_of_tile(name, shape, slot)
            first = self._streamed_tokens(name, slot)[0]
            return first + self.context.machine.column_indices(0, shape)
        if not counts_up(self.context.call, shape[0]):
            return self._tokens_of_tile(name, shape, slot)
        return self.row_tokens[name] + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)

    def _tokens_of_tile(self, name: str, shape: tuple[int, int], slot) -> jax.Array:
        """An array's numbers of the tile's rows or columns, as a matrix."""
        if name in self.row_tokens:
            return spread(self.row_tokens[name], shape, rows=True)
        return spread(load_vector(self._streamed_tokens(name, slot), rows=False), shape, rows=False)

    def _streamed_tokens(self, name: str, slot):
        index = list(self.context.gmem.tokens.given(self.streamed)).index(name)
        return self.context.smem.tokens.at[index, slot]
