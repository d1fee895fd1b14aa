"""JAX's own splash attention, as axlearn and MaxText call it: the baseline of compile time, served only by name.

A lazy mask holds no array, but JAX evaluates it on every tile in NumPy to find which to visit, at a cost that grows
with T². Where JAX has the mask (full, causal, local, chunked), its kernel computes it, too; every other one
(`|`, `~`, prefix, differing heads) it turns into an array of its mixed tiles. The older baseline is a dense mask, T×T
booleans. The output of a query that may attend to nothing is undefined.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as upstream_masks

from kernels.backends.splash.tuning import DEFAULTS, OTHERS
from kernels.call import AttentionCall, AttentionInputs
from kernels.masks import Mask

MakeMask = Callable[[Mask, tuple[int, int]], upstream_masks.Mask]
"""(mask of one head, (q_len, kv_len)) → JAX's mask."""

_LANES = 128


def unsupported_reason(call: AttentionCall, tuning: None = None) -> str | None:
    """Why JAX's own entry point can't serve the call, or None if it can."""
    if call.has_positions or call.has_sinks or call.return_lse:
        return "JAX's splash attention takes no positions and no sinks, and its lse has no gradient"
    if call.dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, not {call.dtype}"
    if call.q_len % _LANES or call.kv_len % _LANES:
        return f"takes lengths that are multiples of {_LANES}, not {call.q_len} and {call.kv_len}"
    return None


def attend(make_mask: MakeMask, inputs: AttentionInputs, call: AttentionCall, *, interpret: bool = False):
    """Attention of one call; the lse is None. See `kernels.dot_product_attention`."""
    kernel = make_kernel(make_mask, call, interpret=interpret)
    query = (inputs.query.astype(jnp.float32) * call.scale).astype(call.dtype)
    arrays = [x.swapaxes(1, 2) for x in (query, inputs.key, inputs.value)]
    ids = None
    if inputs.query_segment_ids is not None and inputs.key_value_segment_ids is not None:
        ids = upstream.SegmentIds(inputs.query_segment_ids, inputs.key_value_segment_ids)
    output: Any = jax.vmap(kernel)(*arrays, ids)
    return output.swapaxes(1, 2), None


def make_kernel(make_mask: MakeMask, call: AttentionCall, *, interpret: bool = False) -> upstream.SplashAttentionKernel:
    """JAX's kernel object, with the tiles of `splash` as far as they divide the lengths."""
    tuning = DEFAULTS.get(call.target.device_kind, OTHERS)
    q, kv = (math.gcd(size, length) for size, length in ((tuning.block_q, call.q_len), (tuning.block_kv, call.kv_len)))
    made = {mask: make_mask(mask, (call.q_len, call.kv_len)) for mask in call.mask.distinct_heads(call.num_heads)}
    return upstream.make_splash_mha(
        upstream_masks.MultiHeadMask([made[mask] for mask in call.mask.for_each_head(call.num_heads)]),
        block_sizes=upstream.BlockSizes(q, kv, kv, q, kv, kv, q, kv),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.logits_soft_cap,
        interpret=interpret,
    )


def lazy_mask(mask: Mask, shape: tuple[int, int]) -> upstream_masks.Mask:
    """One of JAX's lazy masks, or ours evaluated slice by slice where JAX has none."""
    longest = max(shape)
    if mask.operator in ("&", "|"):
        a, b = (lazy_mask(part, shape) for part in mask.parts)
        return a & b if mask.operator == "&" else a | b
    if mask.allows_all:
        return upstream_masks.FullMask(shape)
    if mask.window is not None:
        # A width as JAX's masks can add it to positions: no more than the sequences are long.
        left, right = (None if side is None else max(-longest, min(side, longest)) for side in mask.window)
        if left is None and right is not None:
            return upstream_masks.CausalMask(shape, right)
        return upstream_masks.LocalMask(shape, (left, right), 0)
    if mask.causal_chunk_size is not None:
        return upstream_masks.ChunkedCausalMask(shape, min(mask.causal_chunk_size, longest))
    return _Sliced(mask, shape)


def dense_mask(mask: Mask, shape: tuple[int, int]) -> upstream_masks.Mask:
    """A mask as an array."""
    q_pos, kv_pos = np.arange(shape[0])[:, None], np.arange(shape[1])[None]
    return upstream_masks.NumpyMask(np.broadcast_to(mask.evaluate(q_pos, kv_pos), shape))


@dataclass(frozen=True)
class _Sliced(upstream_masks.Mask):
    """One of our masks as JAX's: no array, but each slice that JAX asks for is evaluated."""

    mask: Mask
    lengths: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.lengths

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q_pos, kv_pos = (np.arange(*part.indices(length)) for part, length in zip(index, self.lengths, strict=True))
        return self.mask.evaluate(q_pos[:, None], kv_pos[None])


lazy_attention = functools.partial(attend, lazy_mask)
dense_attention = functools.partial(attend, dense_mask)
