"""Splash attention with JAX's own lazy masks: the baseline of compile time, served only by name.

A lazy mask holds no array, but JAX evaluates it on every tile in NumPy to find which to visit, at a cost that grows
with T². Where JAX has the mask (full, causal, local, chunked), its kernel computes it, too; every other one
(`|`, `~`, prefix, differing heads) it turns into an array of its mixed tiles.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`, as axlearn and MaxText use it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as upstream
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as upstream_info

from kernels.backends.splash.launch import Pass, PassMask
from kernels.backends.splash.passes import Tokens, run_backward, run_forward
from kernels.backends.splash.support import unsupported_reason as splash_unsupported_reason
from kernels.backends.splash.tuning import SplashTuning, resolve
from kernels.call import AttentionCall
from kernels.masks import Mask

__all__ = ["backward", "forward", "resolve", "unsupported_reason"]


def unsupported_reason(call: AttentionCall, tuning: SplashTuning | None = None) -> str | None:
    """Why JAX's masks can't serve the call, or None if they can."""
    if call.has_positions:
        return "JAX's lazy masks have no positions"
    return splash_unsupported_reason(call, tuning)


def upstream_mask(make_mask, call: AttentionCall, walk: Pass, tokens: Tokens) -> PassMask:
    """A pass's mask as JAX makes it.

    Args:
      make_mask: (mask, padded q_len, padded kv_len, true kv_len) → JAX's mask of one head.
    """
    blocks = (walk.block_q, walk.block_kv)
    padded = (-(-call.q_len // walk.block_q) * walk.block_q, -(-call.kv_len // walk.block_kv) * walk.block_kv)
    heads = upstream.MultiHeadMask(
        [make_mask(mask, *padded, call.kv_len) for mask in call.mask.for_each_head(call.num_heads)]
    )
    process = upstream_info.process_mask_dkv if walk.transposed else upstream_info.process_mask
    info, function = process(heads, blocks, shrink_grid=walk.shrunk)
    if info.block_mask is None:
        # Every tile is visited, and none is masked.
        steps = tuple(length // block for length, block in zip(padded, blocks, strict=True))
        tiles = np.arange(steps[0])[:, None] if walk.transposed else np.arange(steps[1])
        info = info._replace(data_next=np.broadcast_to(tiles, (1, *steps)), block_mask=np.full((1, *steps), 2, np.int8))

    info = jax.tree.map(jnp.asarray, info)
    numbers = tuple(range(call.num_heads)) if len(info.block_mask) > 1 else (0,) * call.num_heads
    if function is None:
        return PassMask(info, None, numbers)
    return PassMask(info, lambda number, queries, kv_pos, kv_place: function(queries.of_pairs, kv_pos), numbers)


def lazy_mask(mask: Mask, q_len: int, kv_len: int, true_kv_len: int) -> upstream.Mask:
    """One of JAX's lazy masks, or ours evaluated slice by slice where JAX has none."""
    shape, longest = (q_len, kv_len), max(q_len, kv_len)

    def within(width: int) -> int:
        """A width as JAX's masks can add it to positions: no more than the sequences are long."""
        return max(-longest, min(width, longest))

    if true_kv_len == kv_len:
        if mask.operator in ("&", "|"):
            a, b = (lazy_mask(part, q_len, kv_len, kv_len) for part in mask.parts)
            return a & b if mask.operator == "&" else a | b
        if mask.allows_all:
            return upstream.FullMask(shape)
        if mask.window is not None:
            left, right = (None if side is None else within(side) for side in mask.window)
            if left is None and right is not None:
                return upstream.CausalMask(shape, right)
            return upstream.LocalMask(shape, (left, right), 0)
        if mask.causal_chunk_size is not None:
            return upstream.ChunkedCausalMask(shape, min(mask.causal_chunk_size, longest))
    return _Sliced(mask, shape, true_kv_len)


class _Sliced(upstream.Mask):
    """One of our masks as JAX's: no array, but each slice that JAX asks for is evaluated."""

    def __init__(self, mask: Mask, shape: tuple[int, int], true_kv_len: int):
        self._mask, self._shape, self._true_kv_len = mask, shape, true_kv_len

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q_pos, kv_pos = (np.arange(*part.indices(length)) for part, length in zip(index, self._shape, strict=True))
        return self._mask.evaluate(q_pos[:, None], kv_pos[None]) & (kv_pos < self._true_kv_len)

    def __hash__(self):
        return hash((self._mask, self._shape, self._true_kv_len))

    def __eq__(self, other: object):
        if not isinstance(other, _Sliced):
            return NotImplemented
        return (self._mask, self._shape, self._true_kv_len) == (other._mask, other._shape, other._true_kv_len)


_source = functools.partial(upstream_mask, lazy_mask)
forward = functools.partial(run_forward, _source)
backward = functools.partial(run_backward, _source)
