"""JAX's own splash attention, as axlearn and MaxText call it: the baseline of compile time.

A lazy mask holds no array, but JAX evaluates it on every tile in NumPy to find which to visit, at a cost that grows
with T². Where JAX has the mask (full, causal, local, chunked), its kernel computes it, too; every other one
(`|`, `~`, prefix, differing heads) it turns into an array of its mixed tiles. The older baseline is a dense mask, T×T
booleans. The output of a query that may attend to nothing is undefined.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as upstream_masks

from kernels.backends.splash.tuning import DEFAULTS, OTHERS
from kernels.call import AttentionCall, make_call
from kernels.masks import Mask

Baseline = Literal["dense", "upstream_lazy"]

_LANES = 128


def attention(source: Baseline, query, key, value, mask: Mask, device: Any = None, *, interpret: bool = False):
    """Attention of one call, laid out as by `kernels.dot_product_attention`.

    Raises:
      ValueError: lengths that JAX's kernel doesn't take.
    """
    call = describe_call(query, key, value, mask, device)
    kernel = make_kernel(source, call, interpret=interpret)
    query = (query.astype(jnp.float32) * call.scale).astype(call.dtype)
    output: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (query, key, value)))
    return output.swapaxes(1, 2)


def describe_call(query, key, value, mask: Mask, device: Any = None) -> AttentionCall:
    """The static part of a call that has nothing but a mask."""
    absent = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions", "scale")
    options = dict.fromkeys((*absent, "logits_soft_cap", "sinks"))
    return make_call(query, key, value, mask, **options, return_lse=False, device=device)[1]


def make_kernel(source: Baseline, call: AttentionCall, *, interpret: bool = False) -> upstream.SplashAttentionKernel:
    """JAX's kernel object, with the tiles of `splash` as far as they divide the lengths."""
    if call.q_len % _LANES or call.kv_len % _LANES:
        raise ValueError(
            f"JAX's splash attention takes lengths that are multiples of {_LANES}, not {call.q_len} and {call.kv_len}"
        )
    make_mask = lazy_mask if source == "upstream_lazy" else dense_mask
    tuning = DEFAULTS.get(call.target.device_kind, OTHERS)
    q, kv = (math.gcd(size, length) for size, length in ((tuning.block_q, call.q_len), (tuning.block_kv, call.kv_len)))
    made = {mask: make_mask(mask, (call.q_len, call.kv_len)) for mask in call.mask.distinct_heads(call.num_heads)}
    return upstream.make_splash_mha(
        upstream_masks.MultiHeadMask([made[mask] for mask in call.mask.for_each_head(call.num_heads)]),
        block_sizes=upstream.BlockSizes(q, kv, kv, q, kv, kv, q, kv),
        head_shards=1,
        q_seq_shards=1,
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
