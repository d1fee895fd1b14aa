"""Splash attention with a dense `NumpyMask`, T×T booleans at trace time: the older baseline, served only by name."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as upstream

from kernels.backends.splash.passes import run_backward, run_forward
from kernels.backends.splash.tuning import resolve
from kernels.backends.splash.upstream_lazy import unsupported_reason, upstream_mask
from kernels.masks import Mask

__all__ = ["backward", "forward", "resolve", "unsupported_reason"]


def dense_mask(mask: Mask, q_len: int, kv_len: int, true_kv_len: int) -> upstream.Mask:
    """A mask as an array; the heads of a call share one where their masks are equal."""
    state = mask.state()
    dense = _dense_mask if state is not None else _dense_mask.__wrapped__
    return dense(mask, state, q_len, kv_len, true_kv_len)


@functools.lru_cache(maxsize=1)
def _dense_mask(mask: Mask, state: Hashable | None, q_len: int, kv_len: int, true_kv_len: int) -> upstream.Mask:
    """The array; `state` is there for the cache alone."""
    kv_pos = np.arange(kv_len)
    inside = mask.evaluate(np.arange(q_len)[:, None], kv_pos[None])
    return upstream.NumpyMask(np.broadcast_to(inside & (kv_pos < true_kv_len), (q_len, kv_len)))


_source = functools.partial(upstream_mask, dense_mask)
forward = functools.partial(run_forward, _source)
backward = functools.partial(run_backward, _source)
