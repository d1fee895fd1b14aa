"""Attention in plain XLA, on any device: O(T) memory, only the tiles that aren't EMPTY, its own backward.

The forward walks the plan's rows: for each query tile an online softmax over its PARTIAL tiles, then over its
FULL ones, where no mask is evaluated. The backward walks the transposed plan: for each
key/value tile it recomputes the probabilities p once and gathers dK and dV there, while dQ is added up in place.
All query heads of one key/value head form the rows of a single matmul.

Source: FlashAttention (arXiv:2205.14135, arXiv:2307.08691).

Dimensions: B batch, K key/value heads, G query heads per key/value head, M = G·block_q rows of a query
tile, C = block_kv columns of a key/value tile, H and V head dims, R and J numbers of query and key/value tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.backends.softmax import MASKED, RunningSoftmax, matmul, soft_capped
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.masks.bounds import OF_QUERIES, is_within
from kernels.plan import Row, Rows, make_rows
from kernels.tracing.mesh_axes import vary


@dataclass(frozen=True)
class BlockwiseTuning:
    """Sides of a tile of the `blockwise` backend, in tokens."""

    backend: ClassVar[str] = "blockwise"

    block_q: int
    block_kv: int

    def __post_init__(self):
        if self.block_q < 1 or self.block_kv < 1:
            raise ValueError(f"block_q={self.block_q} and block_kv={self.block_kv} must be at least 1")


# On a CPU, large enough for XLA to split a tile's matmuls over the cores and small enough for the caches; elsewhere,
# large enough that starting a kernel doesn't count. The fastest of 128 to 1024 (CPU) and 256 to 4096 (H200) on each
# side, for causal attention and a window of 1,024 at 32,768 tokens together.
CPU_TUNING = BlockwiseTuning(512, 256)
ACCELERATOR_TUNING = BlockwiseTuning(1024, 1024)


def unsupported_reason(call: AttentionCall, tuning: BlockwiseTuning | None = None) -> str | None:
    """Serves every call."""
    return None


def resolve(tuning: BlockwiseTuning | None, call: AttentionCall) -> BlockwiseTuning:
    """The tiles of a call that names none."""
    return tuning or (CPU_TUNING if call.target.platform == "cpu" else ACCELERATOR_TUNING)


class _Tiling:
    """A call cut into tiles: shapes, schedules, and the tiles themselves.

    Arrays keep the layout that they came in; a tile is cut out and turned over inside the loop, where it
    fits the cache, so no second copy of any array is made (but for ragged lengths, which are padded).
    """

    def __init__(self, inputs: AttentionInputs, call: AttentionCall, tuning: BlockwiseTuning):
        self.call, self.inputs = call, inputs
        self.block_q, self.block_kv = min(tuning.block_q, call.q_len), min(tuning.block_kv, call.kv_len)
        self.num_q, self.num_kv = -(-call.q_len // self.block_q), -(-call.kv_len // self.block_kv)
        # Segment ids and positions, those that were given, cut into tiles.
        given = {
            "query_segment_ids": self.block_q,
            "query_positions": self.block_q,
            "key_value_segment_ids": self.block_kv,
            "key_value_positions": self.block_kv,
        }
        self.tokens: dict[str, Int[Array, "B tiles block"]] = {
            name: _split_tokens(ids, block)
            for name, block in given.items()
            if (ids := getattr(inputs, name)) is not None
        }
        for name in call.bounds:
            block = self.block_q if name in OF_QUERIES else self.block_kv
            self.tokens[name] = _split_tokens(getattr(inputs.bounds, name), block)

    def pad_q(self, x: Float[Array, "B T ..."], fill: float = 0) -> Float[Array, "B R*block_q ..."]:
        """Fills the last query tile."""
        return _pad_tokens(x, self.num_q * self.block_q, fill)

    def pad_kv(self, x: Float[Array, "B S ..."]) -> Float[Array, "B J*C ..."]:
        """Fills the last key/value tile."""
        return _pad_tokens(x, self.num_kv * self.block_kv, 0)

    def query_tile(self, x: Float[Array, "B T N X"], b, i) -> Float[Array, "K M X"]:
        """Query tile i of a padded query-shaped array; its rows run over (group, token)."""
        c = self.call
        tile = jax.lax.dynamic_slice_in_dim(x[b], i * self.block_q, self.block_q)
        tile = tile.reshape(self.block_q, c.num_kv_heads, c.group_size, -1).transpose(1, 2, 0, 3)
        return tile.reshape(c.num_kv_heads, c.group_size * self.block_q, -1)

    def query_tokens(self, tile: Float[Array, "K M X"]) -> Float[Array, "block_q N X"]:
        """Turns a query tile back into tokens."""
        c = self.call
        tile = tile.reshape(c.num_kv_heads, c.group_size, self.block_q, -1).transpose(2, 0, 1, 3)
        return tile.reshape(self.block_q, c.num_heads, -1)

    def key_value_tile(self, x: Float[Array, "B S K X"], b, j) -> Float[Array, "K C X"]:
        """Key/value tile j of a padded key-shaped array."""
        return jax.lax.dynamic_slice_in_dim(x[b], j * self.block_kv, self.block_kv).transpose(1, 0, 2)

    def join(self, tiles: Float[Array, "B*tiles block ..."], length: int) -> Float[Array, "B length ..."]:
        """Joins the tokens of all query tiles, or of all key/value tiles."""
        return tiles.reshape(self.call.batch, -1, *tiles.shape[2:])[:, :length]

    def rows(self, *, transposed: bool) -> Rows:
        """The key/value tiles that each query tile visits; transposed, the query tiles that visit each of those."""
        return make_rows(self.inputs, self.call, self.block_q, self.block_kv, transposed=transposed)

    def allowed(self, b, i, j) -> Array:
        """Which pairs of tile (i, j) of batch element b may attend, bool `[block_q, C]`."""
        c, tokens = self.call, self.tokens
        kv_index = j * self.block_kv + jnp.arange(self.block_kv, dtype=jnp.int32)
        if c.has_positions:
            q_pos, kv_pos = tokens["query_positions"][b, i], tokens["key_value_positions"][b, j]
        else:
            q_pos, kv_pos = i * self.block_q + jnp.arange(self.block_q, dtype=jnp.int32), kv_index
        allowed = c.mask(q_pos[:, None], kv_pos[None, :])
        if c.has_segment_ids:
            allowed &= tokens["query_segment_ids"][b, i][:, None] == tokens["key_value_segment_ids"][b, j][None, :]
        if c.kv_len % self.block_kv:
            allowed &= (kv_index < c.kv_len)[None, :]
        for name in c.bounds:
            own = tokens[name][b, i][:, None] if name in OF_QUERIES else tokens[name][b, j][None, :]
            q_index = i * self.block_q + jnp.arange(self.block_q, dtype=jnp.int32)
            allowed &= is_within(name, kv_index[None, :] if name in OF_QUERIES else q_index[:, None], own)
        return allowed

    def by_row(self, sinks: Float[Array, " N"]) -> Float[Array, "K M"]:
        """The sink of each row of a query tile."""
        return jnp.repeat(
            sinks.astype(self.call.softmax_dtype).reshape(self.call.num_kv_heads, -1), self.block_q, axis=1
        )

    def logits(self, query: Float[Array, "K M H"], key: Float[Array, "K C H"]) -> Float[Array, "K M C"]:
        """Logits of a tile, scaled and soft-capped but not masked."""
        return soft_capped(self.matmul("kmh,kch->kmc", query, key) * self.call.scale, self.call.logits_soft_cap)

    def matmul(self, subscripts: str, a: Array, b: Array) -> Array:
        """Operands in the call's dtype, sums in the softmax's."""
        return matmul(subscripts, a, b, self.call.softmax_dtype)

    def masked(self, logits: Float[Array, "K M C"], b, i, j) -> Float[Array, "K M C"]:
        """Replaces the logits of pairs that may not attend."""
        c = self.call
        by_group = logits.reshape(c.num_kv_heads, c.group_size, self.block_q, self.block_kv)
        return jnp.where(self.allowed(b, i, j), by_group, MASKED).reshape(logits.shape)


def _split_tokens(x: Int[Array, "B L"], block: int) -> Int[Array, "B tiles block"]:
    """Cuts ids or positions into tiles; the last one is filled by repeating the last token's."""
    batch, length = x.shape
    return jnp.pad(x, [(0, 0), (0, -length % block)], mode="edge").reshape(batch, -1, block)


def _pad_tokens(x: Array, length: int, fill: float) -> Array:
    padding = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=fill) if padding else x


def _over_tiles(row: Row, visit: Callable, carry):
    """Calls `visit(rank, carry, full=…)` for each tile of a row: the PARTIAL ones, then the FULL ones."""
    if row.kind is not None:
        return jax.lax.fori_loop(0, row.num_tiles, functools.partial(_visit_unless_empty, row, visit), carry)
    carry = jax.lax.fori_loop(0, row.num_partial, functools.partial(visit, full=False), carry)
    return jax.lax.fori_loop(row.num_partial, row.num_tiles, functools.partial(visit, full=True), carry)


def _visit_unless_empty(row: Row, visit: Callable, rank, carry):
    """Visits a tile of a row that has EMPTY ones."""
    assert row.kind is not None
    visits = [functools.partial(visit, rank, full=full) for full in (False, True)]
    return jax.lax.switch(row.kind(row.tile(rank)), [lambda carry: carry, *visits], carry)


def fwd(
    inputs: AttentionInputs, call: AttentionCall, tuning: BlockwiseTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse. See `kernels.attention.core`."""
    tiling = _Tiling(inputs, call, tuning)
    query, key, value = tiling.pad_q(inputs.query), tiling.pad_kv(inputs.key), tiling.pad_kv(inputs.value)
    rows = tiling.rows(transposed=False)

    def query_tile(index):
        b, i = index // tiling.num_q, index % tiling.num_q
        row, q = rows.read(b, i), tiling.query_tile(query, b, i)

        def visit(rank, softmax, *, full):
            j = row.tile(rank)
            logits = tiling.logits(q, tiling.key_value_tile(key, b, j))
            if not full:
                logits = tiling.masked(logits, b, i, j)
            v = tiling.key_value_tile(value, b, j)
            return softmax.add_tile(logits, lambda p: tiling.matmul("kmc,kcv->kmv", p.astype(call.dtype), v))

        softmax = vary(RunningSoftmax.start(q.shape[:2], call.value_dim, call.softmax_dtype), call.varying_axes)
        softmax = _over_tiles(row, visit, softmax)
        output, lse = softmax.finish(None if inputs.sinks is None else tiling.by_row(inputs.sinks), call.dtype)
        return tiling.query_tokens(output), tiling.query_tokens(lse[..., None])[..., 0]

    tiles = jax.lax.map(query_tile, jnp.arange(call.batch * tiling.num_q, dtype=jnp.int32))
    output, lse = (tiling.join(x, call.q_len) for x in tiles)
    return output, lse


def bwd(inputs: AttentionInputs, call: AttentionCall, tuning: BlockwiseTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value. See `kernels.attention.core`."""
    tiling = _Tiling(inputs, call, tuning)

    # exp(logits − inf) = 0 in rows that attend to nothing and in those that fill up the last tile.
    lse = jnp.where(cotangent.lse != -jnp.inf, cotangent.lse, jnp.inf)
    query, key, value = tiling.pad_q(inputs.query), tiling.pad_kv(inputs.key), tiling.pad_kv(inputs.value)
    d_output, delta, lse = (
        tiling.pad_q(cotangent.d_output),
        tiling.pad_q(cotangent.delta),
        tiling.pad_q(lse, fill=jnp.inf),
    )

    rows, zero = tiling.rows(transposed=True), jnp.int32(0)

    def key_value_tile(d_query, index):
        b, j = index // tiling.num_kv, index % tiling.num_kv
        row = rows.read(b, j)
        k, v = tiling.key_value_tile(key, b, j), tiling.key_value_tile(value, b, j)

        def visit(rank, carry, *, full):
            d_key, d_value, d_query = carry
            i = row.tile(rank)
            q, d_out = tiling.query_tile(query, b, i), tiling.query_tile(d_output, b, i)
            capped = tiling.logits(q, k)
            logits = capped if full else tiling.masked(capped, b, i, j)
            p = jnp.exp(logits - tiling.query_tile(lse[..., None], b, i))
            d_logits = p * (tiling.matmul("kmv,kcv->kmc", d_out, v) - tiling.query_tile(delta[..., None], b, i))
            if call.logits_soft_cap is not None:
                d_logits *= 1 - (capped / call.logits_soft_cap) ** 2
            d_logits = (d_logits * call.scale).astype(call.dtype)
            d_value += tiling.matmul("kmc,kmv->kcv", p.astype(call.dtype), d_out)
            d_key += tiling.matmul("kmc,kmh->kch", d_logits, q)
            d_q = tiling.query_tokens(tiling.matmul("kmc,kch->kmh", d_logits, k))
            first = i * tiling.block_q
            d_q += jax.lax.dynamic_slice_in_dim(d_query[b], first, tiling.block_q)
            return d_key, d_value, jax.lax.dynamic_update_slice(d_query, d_q[None], (b, first, zero, zero))

        carry = (jnp.zeros(k.shape, call.softmax_dtype), jnp.zeros(v.shape, call.softmax_dtype), d_query)
        d_key, d_value, d_query = _over_tiles(row, visit, vary(carry, call.varying_axes))
        return d_query, tuple(x.transpose(1, 0, 2).astype(call.dtype) for x in (d_key, d_value))

    d_query, d_key_value = jax.lax.scan(
        key_value_tile,
        vary(jnp.zeros(query.shape, call.softmax_dtype), call.varying_axes),
        jnp.arange(call.batch * tiling.num_kv, dtype=jnp.int32),
    )
    d_key, d_value = (tiling.join(x, call.kv_len) for x in d_key_value)
    return d_query[:, : call.q_len].astype(call.dtype), d_key, d_value
