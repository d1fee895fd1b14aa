"""`decode_attention`: validates a call, chooses an implementation, calls it."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Literal, overload

import jax
from jaxtyping import Array, Float, Int

from kernels.decode.call import Cache, DecodeCall, make_decode_call
from kernels.masks import Mask

_logger = logging.getLogger(__name__)

# In order of preference. Each module has `attend(inputs, call)`, `unsupported_reason(call)` and `slower_reason(call)`,
# which says why one of those after it is faster.
IMPLEMENTATIONS = {
    "dense": "kernels.decode.dense",
    "triton": "kernels.decode.triton",
    "blockwise": "kernels.decode.blockwise",
}


@overload
def decode_attention(
    query: Array,
    cache: Cache,
    mask: Mask | None = None,
    *,
    sequences: Array | None = None,
    query_positions: Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
    device: jax.Device | None = None,
    return_lse: Literal[False] = False,
) -> Array: ...


@overload
def decode_attention(
    query: Array,
    cache: Cache,
    mask: Mask | None = None,
    *,
    sequences: Array | None = None,
    query_positions: Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
    device: jax.Device | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...


def decode_attention(
    query: Float[Array, "B T N H"],
    cache: Cache,
    mask: Mask | None = None,
    *,
    sequences: Int[Array, " B"] | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
    device: jax.Device | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of a few new tokens of each sequence to a key/value cache that holds them and those before them.

    Equals `dot_product_attention` on each whole sequence, at its last tokens. Write the new tokens first: a query sees
    its own token only in the cache. Blocks of cells that hold nothing which a sequence may see are not read. Forward
    only. NaN and infinities come out as they do from `dot_product_attention`; those in cells that none of a sequence's
    queries may see don't reach it.

    Args:
      query: of 1 to 16 new tokens of each sequence (more is correct, and slower than a prompt's
        `dot_product_attention`), in the cache's dtype. Query head n reads key/value head n // (N / K).
      cache: a `SlabCache` or a `UnifiedCache`.
      mask: which pairs may attend (`kernels.masks`), evaluated on the tokens' positions in their sequences; None
        allows all. Static under `jax.jit`.
      sequences: the cache's sequence that each row of `query` belongs to; by default row i is sequence i.
      query_positions: of the new tokens. By default they're the last T of each sequence; rows of which fewer count
        (`write(..., num_tokens=...)`) need theirs given.
      scale: multiplies the logits; default 1/√H. A finite number that isn't traced, like the soft cap.
      logits_soft_cap: bounds the logits to ±cap by cap·tanh(logits/cap); positive.
      sinks: one logit per query head that takes part in the softmax but adds no value.
      implementation: "dense" (any device; every cell is read, which GPUs do faster where the cache is small), "triton"
        (NVIDIA GPUs), "blockwise" (any device), or None for the fastest that serves the call.
      device: one of the devices that the call will be compiled for, when that isn't JAX's default.
      return_lse: also return the log of the softmax's denominator (sinks included), float32 `[B, T, N]`.

    Returns:
      The output in query's dtype, or (output, lse). A query that sees nothing gets output 0, lse −inf.

    Raises:
      ValueError: arguments that don't fit together, an unknown implementation, or a named one that can't serve the
        call (it never falls back).

    Source: split over the cache as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/); skipping of masked
    blocks in a cache that sequences share as in llama.cpp.

    >>> import jax.numpy as jnp
    >>> from kernels import CausalMask, SlabCache
    >>> cache = SlabCache.empty(num_sequences=2, capacity=1024, num_kv_heads=4, head_dim=64)
    >>> token = jnp.ones((2, 1, 4, 64), jnp.bfloat16)
    >>> cache = cache.write(token, token)
    >>> decode_attention(token, cache, CausalMask()).shape
    (2, 1, 4, 64)
    """
    inputs, call = make_decode_call(
        query,
        cache,
        mask,
        sequences=sequences,
        query_positions=query_positions,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        device=device,
    )
    output, lse = select_implementation(call, implementation).attend(inputs, call)
    return (output, lse) if return_lse else output


def select_implementation(call: DecodeCall, implementation: str | None = None) -> ModuleType:
    """The module that serves a call: the named one, or the fastest that can.

    Raises:
      ValueError: an unknown name, or a named implementation that can't serve the call.
    """
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"unknown implementation {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}, or None"
            )
        module = importlib.import_module(IMPLEMENTATIONS[implementation])
        reason = module.unsupported_reason(call)
        if reason is not None:
            raise ValueError(f"implementation={implementation!r} can't serve this call: {reason}")
        return module
    for name, path in IMPLEMENTATIONS.items():
        module = importlib.import_module(path)
        reason = module.unsupported_reason(call) or module.slower_reason(call)
        if reason is None:
            return module
        _log_once(name, reason)
    raise AssertionError(f"no implementation serves {call}: blockwise serves every call")


@functools.lru_cache(maxsize=256)
def _log_once(name: str, reason: str) -> None:
    _logger.info("decoding: %s passed over: %s", name, reason)
