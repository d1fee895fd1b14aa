"""The splash kernel's passes: JAX's TPU kernel under our attention contract.

JAX's own entry point (`make_splash_mha`) makes its `MaskInfo` from a mask that it evaluates on every tile, hides the
softmax's denominator from differentiation, and leaves rows that attend to nothing undefined. So this module calls its
three `pallas_call`s one by one, by names that begin with an underscore; they are the same from JAX 0.10.2 to 0.12,
which a test of each of their signatures holds.

Where tiles may be skipped is decided in three places: by the plan (static), by segment ids and by query positions (on
the device, from the lowest and highest of each tile).

Dimensions: B batch, T and S query and key/value length, N query heads, K key/value heads, H and V head dims, R rows
of a tile grid and J its steps. Arrays within a pass are padded to whole tiles.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float, Int

from kernels.backends.splash.tile_grid import TileGrid, next_visited, partial_blocks, plan_grid, whole_grid
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.masks import TileKind

if TYPE_CHECKING:
    from kernels.backends.splash.tuning import SplashTuning

_MASKED = upstream.DEFAULT_MASK_VALUE


@dataclass(frozen=True)
class Pass:
    """One walk over the tiles.

    Attributes:
      block_q, block_kv: its tile.
      block_kv_compute: the part of it that one matmul takes.
      transposed: rows of the grid are key/value tiles, as for dK and dV.
      shrunk: rows of the grid are as long as the longest needs; the fused backward needs all tiles.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int
    transposed: bool
    shrunk: bool

    @staticmethod
    def fitted(
        call: AttentionCall, block_q: int, block_kv: int, compute: int, *, transposed=False, shrunk=True
    ) -> Pass:
        """With blocks no larger than the sequences need."""
        block_q, block_kv = min(block_q, _whole(call.q_len, 128)), min(block_kv, _whole(call.kv_len, 128))
        return Pass(block_q, block_kv, math.gcd(block_kv, compute), transposed, shrunk)


def forward_pass(call: AttentionCall, tuning: SplashTuning) -> Pass:
    """The pass that makes the output and the lse."""
    return Pass.fitted(call, tuning.block_q, tuning.block_kv, tuning.block_kv_compute)


def d_key_value_pass(call: AttentionCall, tuning: SplashTuning) -> Pass:
    """The pass that makes dK and dV, and dQ too if fused."""
    blocks = (tuning.block_q_dkv, tuning.block_kv_dkv, tuning.block_kv_dkv_compute)
    return Pass.fitted(call, *blocks, transposed=True, shrunk=tuning.backward == "split")


def d_query_pass(call: AttentionCall, tuning: SplashTuning) -> Pass:
    """The pass that makes dQ alone."""
    return Pass.fitted(call, tuning.block_q_dq, tuning.block_kv_dq, tuning.block_kv_dq)


class PassMask(NamedTuple):
    """What one pass knows of the mask."""

    info: MaskInfo
    """The tiles to visit, as the kernel takes them."""
    function: Callable[[Array, Array], Array] | None
    """(query positions, key/value positions) → allowed, traced into the kernel; None: the info says it all."""


class Tokens(NamedTuple):
    """What is known of each token on the device only; None where it wasn't given."""

    query_segment_ids: Int[Array, "*B T"] | None
    key_value_segment_ids: Int[Array, "*B S"] | None
    query_positions: Int[Array, "*B T"] | None


MaskSource = Callable[[AttentionCall, Pass, Tokens], PassMask]
"""Makes a pass's mask for one sequence: what sets the splash backends apart."""


def planned_mask(call: AttentionCall, walk: Pass, tokens: Tokens) -> PassMask:
    """The mask from its block plan, in closed form, refined on the device by segment ids and query positions."""
    grid, function = grid_of(call, walk), _predicate(call, walk)
    kinds = _refined(call, grid, walk, tokens)
    if function is None and kinds is grid.kinds and grid.all_full:
        return PassMask(MaskInfo(None, None, None, None, None), None)

    mask_next = blocks = None
    q_positions: np.ndarray | Array | None = None
    if call.mask.needs_lookup:
        lengths, sides = (call.q_len, call.kv_len), (walk.block_q, walk.block_kv)
        blocks, mask_next = partial_blocks(call.mask, grid, lengths, sides, transposed=walk.transposed)
        function = None
    elif function is not None:
        q_positions = tokens.query_positions
        if q_positions is None:
            q_positions = np.arange(_whole(call.q_len, walk.block_q), dtype=np.int32)

    def for_kernel(steps):
        """`[R, J]` with query tiles first, and a dimension of heads in front, over which it is broadcast."""
        return jnp.asarray(steps.T if walk.transposed else steps)[None]

    info = MaskInfo(
        data_next=for_kernel(next_visited(grid.tiles, kinds != TileKind.EMPTY).astype(grid.index_dtype)),
        mask_next=None if mask_next is None else for_kernel(mask_next),
        block_mask=for_kernel(kinds),
        partial_mask_blocks=None if blocks is None else jnp.asarray(blocks),
        # Upstream's annotation says NumPy; the kernel broadcasts it like any array.
        q_sequence=None if q_positions is None else cast(np.ndarray, jnp.asarray(q_positions)),
    )
    return PassMask(info, function)


def grid_of(call: AttentionCall, walk: Pass) -> TileGrid:
    """The tiles that a pass may visit, as far as they are known ahead of time."""
    if call.has_query_positions:
        num_q, num_kv = -(-call.q_len // walk.block_q), -(-call.kv_len // walk.block_kv)
        return whole_grid(*((num_kv, num_q) if walk.transposed else (num_q, num_kv)))
    return plan_grid(
        call.mask,
        call.q_len,
        call.kv_len,
        walk.block_q,
        walk.block_kv,
        transposed=walk.transposed,
        shrunk=walk.shrunk,
    )


def _predicate(call: AttentionCall, walk: Pass) -> Callable[[Array, Array], Array] | None:
    """What the kernel computes in each tile, or None if it allows all pairs."""
    sticks_out = call.kv_len % walk.block_kv != 0
    if call.mask.allows_all and not sticks_out:
        return None
    if not sticks_out:
        return call.mask
    return lambda q_pos, kv_pos: call.mask(q_pos, kv_pos) & (kv_pos < call.kv_len)


def _refined(call: AttentionCall, grid: TileGrid, walk: Pass, tokens: Tokens) -> np.ndarray | Array:
    """The grid's kinds, with EMPTY for the tiles that segment ids or positions rule out."""
    kinds: np.ndarray | Array = grid.kinds
    rows, columns = np.arange(grid.tiles.shape[0])[:, None], grid.tiles
    i, j = (columns, rows) if walk.transposed else (rows, columns)
    if tokens.query_positions is not None:
        q_lo, q_hi = (corner[i] for corner in _corners(tokens.query_positions, walk.block_q))
        kv_hi = np.minimum((j + 1) * walk.block_kv, call.kv_len) - 1
        kinds = jnp.minimum(kinds, call.mask.classify(q_lo, q_hi, j * walk.block_kv, kv_hi))
    if tokens.query_segment_ids is not None and tokens.key_value_segment_ids is not None:
        q_lo, q_hi = (corner[i] for corner in _corners(tokens.query_segment_ids, walk.block_q))
        kv_lo, kv_hi = (corner[j] for corner in _corners(tokens.key_value_segment_ids, walk.block_kv))
        kinds = jnp.where((q_lo <= kv_hi) & (kv_lo <= q_hi), kinds, TileKind.EMPTY)
    return kinds if kinds is grid.kinds else kinds.astype(jnp.int8)


def _corners(tokens: Int[Array, " L"], block: int) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Lowest and highest of each tile."""
    by_tile = tokens.reshape(-1, block)
    return by_tile.min(axis=1), by_tile.max(axis=1)


def _full_precision(call: AttentionCall) -> contextlib.AbstractContextManager:
    """For float32, whose operands JAX rounds to fewer bits on TPUs unless told otherwise while a kernel is traced."""
    return jax.default_matmul_precision("highest") if call.dtype == jnp.float32 else contextlib.nullcontext()


def run_forward(
    source: MaskSource, inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse.

    Args:
      source: makes the passes' masks; `planned_mask` takes the mask of one head, which all heads share.
      inputs, call: the call.
      tuning: the passes' tiles.
    """
    walk = forward_pass(call, tuning)
    sizes = upstream.BlockSizes(walk.block_q, walk.block_kv, walk.block_kv_compute)

    def attend_one(tokens, query, key, value):
        mask = source(call, walk, tokens)
        output, (lse,) = upstream._splash_attention_forward(
            mask.info,
            query,
            key,
            value,
            _segment_ids(tokens),
            sinks=None,
            mask_value=_MASKED,
            is_mqa=False,
            block_sizes=sizes,
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=mask.function,
            attn_logits_soft_cap=call.logits_soft_cap,
            interpret=tuning.interpret,
        )
        return output, lse

    query, key, value = _kernel_operands(inputs, call, walk)
    with _full_precision(call):
        output, lse = _over_batch(attend_one, call, _tokens(inputs, call, walk), query, key, value)
    output, lse = output[:, :, : call.q_len].swapaxes(1, 2), lse[:, :, : call.q_len].swapaxes(1, 2)
    # Where all logits are masked, the kernel's maximum stays at _MASKED; where no tile is visited, its sum stays 0.
    # A NaN is neither.
    attends = ~(lse <= 0.5 * _MASKED)
    lse = jnp.where(attends, lse, -jnp.inf)
    alpha = jnp.ones_like(lse)
    if inputs.sinks is not None:
        # The kernel has sinks, too, but with them its lse doesn't tell an empty row from one with small logits.
        sinks = inputs.sinks.astype(lse.dtype)
        row_max = jnp.maximum(lse, sinks)
        row_sum = jnp.exp(lse - row_max) + jnp.exp(sinks - row_max)
        alpha = jnp.exp(lse - row_max) / row_sum
        lse = jnp.where(attends, row_max + jnp.log(row_sum), -jnp.inf)
    return jnp.where(attends[..., None], output * alpha[..., None], 0).astype(call.dtype), lse


def run_backward(
    source: MaskSource, inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning, cotangent: Cotangent
) -> Gradients:
    """The gradients of query, key and value. The arguments are `run_forward`'s."""
    d_output, lse, delta = cotangent
    # exp(logits − a huge lse) = 0 in rows that attend to nothing and in those that fill up the last tile.
    huge = -_MASKED
    kernel_lse = jnp.where(lse != -jnp.inf, lse, huge)

    def run(walk: Pass, backward: Callable):
        def one(tokens, query, key, value, d_output, lse, delta):
            mask = source(call, walk, tokens)
            return backward(
                query,
                key,
                value,
                _segment_ids(tokens),
                None,
                lse,
                d_output,
                delta,
                bq=walk.block_q,
                bkv=walk.block_kv,
                is_mqa=False,
                mask_info=mask.info,
                mask_value=_MASKED,
                attn_logits_soft_cap=call.logits_soft_cap,
                q_layout=upstream.QKVLayout.HEAD_DIM_MINOR,
                k_layout=upstream.QKVLayout.HEAD_DIM_MINOR,
                v_layout=upstream.QKVLayout.HEAD_DIM_MINOR,
                mask_function=mask.function,
                interpret=tuning.interpret,
            )

        filled = ((d_output, 0), (kernel_lse, huge), (delta, 0))
        rows = [_padded(x.swapaxes(1, 2), walk.block_q, 2, fill) for x, fill in filled]
        operands = _kernel_operands(inputs, call, walk)
        with _full_precision(call):
            return _over_batch(one, call, _tokens(inputs, call, walk), *operands, *rows)

    walk = d_key_value_pass(call, tuning)
    d_query, d_key, d_value = run(
        walk,
        functools.partial(
            upstream._splash_attention_bwd_dkv,
            bkv_compute=walk.block_kv_compute,
            use_fused_bwd_kernel=tuning.backward == "fused",
        ),
    )
    if tuning.backward == "split":
        d_query = run(d_query_pass(call, tuning), upstream._splash_attention_bwd_dq)
    d_query = (d_query[:, :, : call.q_len].swapaxes(1, 2).astype(lse.dtype) * call.scale).astype(call.dtype)
    d_key, d_value = (x[:, :, : call.kv_len].swapaxes(1, 2) for x in (d_key, d_value))
    return d_query, d_key, d_value


def _kernel_operands(inputs: AttentionInputs, call: AttentionCall, walk: Pass) -> tuple[Array, Array, Array]:
    """Query (scaled), key and value as `[B, heads, length, head dim]`, padded to whole tiles."""
    query = (inputs.query.astype(jnp.float32) * call.scale).astype(call.dtype)
    blocks = (walk.block_q, walk.block_kv, walk.block_kv)
    query, key, value = (
        _padded(x.swapaxes(1, 2), block, 2) for x, block in zip((query, inputs.key, inputs.value), blocks, strict=True)
    )
    return query, key, value


def _tokens(inputs: AttentionInputs, call: AttentionCall, walk: Pass) -> Tokens:
    """Ids and positions, padded by repeating the last, which adds nothing to what a tile's corners say."""

    def padded(tokens: Array | None, block: int) -> Array | None:
        if tokens is None:
            return None
        return jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % block)], mode="edge")

    return Tokens(
        padded(inputs.query_segment_ids, walk.block_q),
        padded(inputs.key_value_segment_ids, walk.block_kv),
        padded(inputs.query_positions if call.has_query_positions else None, walk.block_q),
    )


def _segment_ids(tokens: Tokens) -> upstream.SegmentIds | None:
    if tokens.query_segment_ids is None or tokens.key_value_segment_ids is None:
        return None
    return upstream.SegmentIds(tokens.query_segment_ids, tokens.key_value_segment_ids)


def _over_batch(function: Callable, call: AttentionCall, tokens: Tokens, *arrays: Array) -> Any:
    """Calls `function(tokens, *arrays)` for each sequence: all in one kernel if they visit the same tiles."""
    if call.batch == 1:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], (tokens, *arrays))))
    if jax.tree.leaves(tokens):
        return jax.lax.map(lambda each: function(*each), (tokens, *arrays))
    return jax.vmap(functools.partial(function, tokens))(*arrays)


def _padded(x: Array, block: int, axis: int, fill: float = 0) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, padding, constant_values=fill) if padding[axis][1] else x


def _whole(length: int, block: int) -> int:
    """The length, rounded up to whole blocks."""
    return -(-length // block) * block
