"""The splash kernels' passes: JAX's TPU kernels under our attention contract.

JAX's own entry point (`make_splash_mha`) makes its `MaskInfo` from a mask that it evaluates on every tile, hides the
softmax's denominator from differentiation, and leaves rows that attend to nothing undefined.

The plan chooses the tiles to visit: on the host from the masks, on the device from segment ids, positions and bounds.

Dimensions: B batch, T and S query and key/value length, N query heads, K key/value heads, H and V head dims, M
distinct masks, R rows of a tile grid and J its steps. Arrays within a pass are padded to whole tiles.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float, Int

from kernels.backends.splash.launch import MASKED, Pass, PassMask, launch
from kernels.backends.splash.tile_grid import next_visited, partial_blocks, plan_grid, whole
from kernels.backends.splash.tuning import SplashTuning, backward_dkv_pass, backward_dq_pass, forward_pass
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.masks import Bounds, TileKind
from kernels.masks.bounds import OF_QUERIES
from kernels.plan import tile_kinds_at


class Tokens(NamedTuple):
    """The segment ids, positions and bounds of `AttentionInputs`: known on the device only, or None."""

    query_segment_ids: Int[Array, "*B T"] | None = None
    key_value_segment_ids: Int[Array, "*B S"] | None = None
    query_positions: Int[Array, "*B T"] | None = None
    key_value_positions: Int[Array, "*B S"] | None = None
    bounds: Bounds | None = None

    @staticmethod
    def of(inputs: AttentionInputs) -> Tokens:
        """The segment ids, positions and bounds of a call's inputs."""
        return Tokens(*(getattr(inputs, name) for name in Tokens._fields))


def planned_mask(call: AttentionCall, walk: Pass, tokens: Tokens) -> PassMask:
    """The masks from their block plans, in closed form, narrowed on the device by segment ids, positions, bounds."""
    distinct = call.mask.distinct_heads(call.num_heads)
    grid = plan_grid(call, walk)
    tile_kinds: np.ndarray | Array = grid.tile_kinds
    if jax.tree.leaves(tokens):
        one = jax.tree.map(lambda x: x[None], tokens)
        inputs = AttentionInputs(*(None,) * 3, **one._asdict())  # type: ignore[arg-type]
        calls = (call._replace(mask=mask, batch=1) for mask in distinct)
        narrowed = jnp.stack(
            [
                tile_kinds_at(inputs, each, walk.block_q, walk.block_kv, tiles, transposed=walk.transposed)[0]
                for each, tiles in zip(calls, grid.tiles, strict=True)
            ]
        )
        if call.mask.needs_lookup:
            # Tiles that are PARTIAL by documents alone have no block of pairs. The kernel compares ids in all tiles.
            narrowed = jnp.where(narrowed == TileKind.EMPTY, TileKind.EMPTY, TileKind.FULL)
        tile_kinds = jnp.minimum(grid.tile_kinds, narrowed).astype(jnp.int8)

    mask_next = partial = function = None
    q_positions: Any = None
    if call.mask.needs_lookup:
        partial, mask_next = partial_blocks(list(distinct), grid, call, walk)
    elif (function := _predicate(call, walk)) is not None:
        if tokens.query_positions is None:
            q_positions = np.arange(whole(call.q_len, walk.block_q), dtype=np.int32)
        else:
            q_positions = _to_whole(tokens.query_positions, walk.block_q)

    def for_kernel(steps):
        """`[M, R, J]` with query tiles before key/value tiles."""
        return steps.swapaxes(1, 2) if walk.transposed else steps

    data_next = next_visited(grid.tiles, tile_kinds != TileKind.EMPTY).astype(grid.index_dtype)
    # Upstream's annotations say NumPy; the kernels take any array.
    info = MaskInfo(
        for_kernel(data_next),
        None if mask_next is None else for_kernel(mask_next),
        for_kernel(tile_kinds),  # type: ignore[arg-type]
        partial,
        q_positions,
    )
    numbers = {mask: number for number, mask in enumerate(distinct)}
    heads = tuple(numbers[mask] for mask in call.mask.for_each_head(call.num_heads))
    return PassMask(info, function, heads, {} if function is None else _tokens_in_kernel(tokens, call, walk))


def _tokens_in_kernel(tokens: Tokens, call: AttentionCall, walk: Pass) -> dict[str, Int[Array, " padded"]]:
    """What the kernel reads beside segment ids and query positions (`PassMask.tokens`)."""
    found: dict[str, Any] = {name: getattr(tokens.bounds, name) for name in call.bounds}
    if call.has_key_value_positions:
        found["kv_positions"] = tokens.key_value_positions
    return {name: _to_whole(x, walk.block_q if name in OF_QUERIES else walk.block_kv) for name, x in found.items()}


def _predicate(call: AttentionCall, walk: Pass):
    """The function that the kernel evaluates in each tile (`PassMask.function`), or None if all pairs are allowed."""
    sticks_out = call.kv_len % walk.block_kv != 0
    if call.mask.allows_all and not (sticks_out or call.bounds):
        return None
    masks = list(call.mask.distinct_heads(call.num_heads))

    def select(number, values):
        result, *others = values
        for i, other in enumerate(others, 1):
            result = jnp.where(number == i, other, result)
        return result

    def allowed(number, q_pos, kv_pos, kv_index):
        if len(masks) == 1:
            result = masks[0](q_pos, kv_pos)
        elif call.mask.has_row_intervals:
            # Chosen once for each query, and not for each pair.
            once = q_pos[:1] if walk.transposed else q_pos[:, :1]
            first, last = (select(number, ends) for ends in zip(*(m.row_interval(once) for m in masks), strict=True))
            result = (first <= kv_pos) & (kv_pos <= last)
        else:
            # Mosaic can't select between booleans.
            each = ((number == i) & mask(q_pos, kv_pos) for i, mask in enumerate(masks))
            result = functools.reduce(jnp.logical_or, each)
        return result & (kv_index < call.kv_len) if sticks_out else result

    return allowed


def _full_precision(call: AttentionCall) -> contextlib.AbstractContextManager:
    """Traces float32 matmuls in full precision: by default JAX rounds their operands to fewer bits on TPUs."""
    return jax.default_matmul_precision("highest") if call.dtype == jnp.float32 else contextlib.nullcontext()


def fwd(
    inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse."""
    walk = forward_pass(call, tuning)

    def attend_one(tokens, query, key, value):
        num_heads, q_len, _ = query.shape
        output, lse = launch(
            _forward_kernel,
            call,
            walk,
            planned_mask(call, walk, tokens),
            _segment_ids(tokens, walk),
            {"q": query, "k": key, "v": value},
            {
                "o": jax.ShapeDtypeStruct((num_heads, q_len, call.value_dim), query.dtype),
                "lse": jax.ShapeDtypeStruct((num_heads, 1, q_len), jnp.float32),
            },
            {
                "logsumexp": (walk.block_q, upstream.NUM_LANES),
                "m": (walk.block_q, upstream.NUM_LANES),
                "l": (walk.block_q, upstream.NUM_LANES),
                "o": (walk.block_q, call.value_dim),
            },
            interpret=tuning.interpret,
            bkv_compute=walk.block_kv_compute,
            head_dim_v=call.value_dim,
        )
        return output, lse[:, 0]

    query, key, value = _kernel_operands(inputs, call, walk)
    with _full_precision(call):
        output, lse = _over_batch(attend_one, call, Tokens.of(inputs), query, key, value)
    output, lse = output[:, :, : call.q_len], lse[:, :, : call.q_len]
    if inputs.sinks is not None:
        # The kernel has sinks, too, but with them its lse is the same for an empty row and for one with small logits.
        sinks = inputs.sinks.astype(lse.dtype)[:, None]
        row_max = jnp.maximum(lse, sinks)
        row_sum = jnp.exp(lse - row_max) + jnp.exp(sinks - row_max)
        attends = lse != -jnp.inf
        alpha = jnp.where(attends, jnp.exp(lse - row_max) / row_sum, 0)
        output = (output.astype(lse.dtype) * alpha[..., None]).astype(call.dtype)
        lse = jnp.where(attends, row_max + jnp.log(row_sum), -jnp.inf)
    return output.swapaxes(1, 2), lse.swapaxes(1, 2)


@functools.wraps(upstream.flash_attention_kernel)
def _forward_kernel(*, o_ref, lse_ref, logsumexp_ref: None, logsumexp_scratch_ref, grid_width: int, **others):
    """Upstream's, whose lse is repeated over the lanes, and then one lse a query; what attends to nothing is cleared.

    XLA would take longer to compile either than this.
    """
    upstream.flash_attention_kernel(o_ref=o_ref, logsumexp_ref=logsumexp_scratch_ref, grid_width=grid_width, **others)

    @pl.when(pl.program_id(2) == grid_width - 1)
    def finish():
        lse, width = logsumexp_scratch_ref[...], o_ref.shape[-1]
        # Where all logits are masked, the kernel's maximum stays at MASKED; where no tile is visited, its sum stays 0.
        # A NaN is neither.
        lse_ref[...] = jnp.where(lse <= 0.5 * MASKED, -jnp.inf, lse).T[:1]
        lse_by_column = jnp.tile(lse, (1, pl.cdiv(width, upstream.NUM_LANES)))[:, :width]
        o_ref[...] = jnp.where(lse_by_column <= 0.5 * MASKED, 0, o_ref[...].astype(jnp.float32)).astype(o_ref.dtype)


def bwd(inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value."""
    d_output, lse, delta = cotangent
    # Left free to fuse the sum with its relayout for the kernels, XLA takes a third longer to compile all of it.
    delta = jax.lax.optimization_barrier(delta)

    def run(
        kernel: Callable, walk: Pass, outputs: dict[str, tuple[int, ...]], scratch: dict[str, tuple[int, int]], **static
    ):
        def one(tokens, query, key, value, d_output, lse, delta):
            shapes = {"dq": query, "dk": key, "dv": value}
            made = {
                name: jax.ShapeDtypeStruct((*lead, *shapes[name].shape), call.dtype) for name, lead in outputs.items()
            }
            return launch(
                kernel,
                call,
                walk,
                planned_mask(call, walk, tokens),
                _segment_ids(tokens, walk),
                {"q": query, "k": key, "v": value, "do": d_output, "logsumexp": lse, "di": delta},
                made,
                scratch,
                interpret=tuning.interpret,
                **static,
            )

        filled = ((d_output, 0), (lse, -jnp.inf), (delta, 0))
        rows = [_padded(x.swapaxes(1, 2), walk.block_q, 2, fill) for x, fill in filled]
        operands = _kernel_operands(inputs, call, walk)
        with _full_precision(call):
            return _over_batch(one, call, Tokens.of(inputs), *operands, *rows)

    walk = backward_dkv_pass(call, tuning)
    fused = tuning.backward == "fused"
    # The fused kernel writes a partial dQ for each key/value tile.
    outputs = {"dq": (-(-call.kv_len // walk.block_kv),)} if fused else {}
    scratch = {"dq": (walk.block_q, call.head_dim)} if fused and walk.block_kv_compute < walk.block_kv else {}
    *d_query, d_key, d_value = run(
        upstream._flash_attention_dkv_kernel,
        walk,
        outputs | {"dk": (), "dv": ()},
        scratch | {"dk": (walk.block_kv, call.head_dim), "dv": (walk.block_kv, call.value_dim)},
        num_q_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        bkv_compute=walk.block_kv_compute,
        is_mqa=False,
    )
    if fused:
        (d_query,) = (x.sum(axis=1) for x in d_query)
    else:
        walk = backward_dq_pass(call, tuning)
        scratch = {"dq": (walk.block_q, call.head_dim)}
        (d_query,) = run(upstream._flash_attention_dq_kernel, walk, {"dq": ()}, scratch)
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


def _segment_ids(tokens: Tokens, walk: Pass) -> upstream.SegmentIds | None:
    if tokens.query_segment_ids is None or tokens.key_value_segment_ids is None:
        return None
    return upstream.SegmentIds(
        _to_whole(tokens.query_segment_ids, walk.block_q), _to_whole(tokens.key_value_segment_ids, walk.block_kv)
    )


def _to_whole(tokens: Int[Array, " L"], block: int) -> Int[Array, " padded"]:
    """One number a token, up to whole tiles."""
    return jnp.pad(tokens, (0, -len(tokens) % block), mode="edge")


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
