"""`decode_attention`: validates a call, has its backend chosen, calls it."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jaxtyping import Array, Float, Int

from kernels.arguments.instead import OF_MASKS, instead_of
from kernels.attention.dispatch import LogitsOptions, choose_backend
from kernels.backends.tuning import Tuning
from kernels.context.exchanges.ring import add_sinks, merge
from kernels.decode.call import Cache, make_decode_call
from kernels.decode.shared_prefix import attend_to_shared
from kernels.decode.tree import TokenTree
from kernels.decode.unified import UnifiedCache
from kernels.masks import Mask


class NewTokens(LogitsOptions, total=False):
    sequences: Array | None
    query_positions: Array | None
    tree: TokenTree | None


@overload
def decode_attention(
    query: Array, cache: Cache, mask: Mask | None = None, *, return_lse: Literal[True], **_: Unpack[NewTokens]
) -> tuple[Array, Array]: ...


@overload
def decode_attention(
    query: Array, cache: Cache, mask: Mask | None = None, *, return_lse: Literal[False] = False, **_: Unpack[NewTokens]
) -> Array: ...


@instead_of(
    **OF_MASKS,
    query_seq_lengths="write(..., num_tokens=...) says how many of a sequence's new tokens count, and query_positions "
    "where they stand",
    key_value_seq_lengths="the cache knows each sequence's length",
    return_residual="use return_lse=True",
)
def decode_attention(
    query: Float[Array, "B T N H"],
    cache: Cache,
    mask: Mask | None = None,
    *,
    sequences: Int[Array, " B"] | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    tree: TokenTree | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | Tuning | None = None,
    device: jax.Device | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of a few new tokens of each sequence to a key/value cache that holds them and those before them.

    Equals `dot_product_attention` on each whole sequence, at its last tokens. Write the new tokens first: a query sees
    its own token only in the cache. Blocks of slots that hold nothing which a sequence may see are not read. Forward
    only. NaN and infinities come out as they do from `dot_product_attention`; those in slots that none of a sequence's
    queries may see don't reach it.

    Args:
      query: of 1 to 16 new tokens of each sequence (more is correct, and slower than a prompt's
        `dot_product_attention`), in the cache's dtype. Query head n reads key/value head n // (N / K).
      cache: a `SlabCache` or a `UnifiedCache`. Slots that all sequences share (`UnifiedCache.share_with_all`) are read
        once for all of them, by the fastest backend of `dot_product_attention`; `implementation` is for the others.
      mask: which pairs may attend (`kernels.masks`), evaluated on the tokens' positions in their sequences; None
        allows all. Static under `jax.jit`.
      sequences: the cache's sequence of each batch element; by default element i is sequence i.
      query_positions: of the new tokens. By default they're the last T of each sequence; give them where fewer than T
        count (`write(..., num_tokens=...)`). A tree counts from them: give them as if each sequence were a chain.
      tree: the branches that the sequences' newest tokens form, the new ones among them; of a `SlabCache`. A token sees
        those before the tree, its own ancestors and itself, as far as the mask allows it, which is then evaluated on
        the positions along the branches: a window counts these, not slots. None: each sequence is a chain.
      scale: multiplies the logits; default 1/√H. A finite number that isn't traced, like the soft cap.
      logits_soft_cap: bounds the logits to ±cap by cap·tanh(logits/cap); positive.
      sinks: one logit per query head that takes part in the softmax but adds no value.
      implementation: "dense" (any device; every slot is read, which GPUs do faster where the cache is small), "triton"
        (NVIDIA GPUs), "blockwise" (any device), a `TritonDecodeTuning`, or None for the fastest that serves the call.
      device: one of the devices that the call will be compiled for, when that isn't JAX's default.
      return_lse: also return the log of the softmax's denominator (sinks included), `[B, T, N]`: float32, or float64
        for float64 inputs.

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
        cache.without_shared() if isinstance(cache, UnifiedCache) else cache,
        mask,
        sequences=sequences,
        query_positions=query_positions,
        tree=tree,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        device=device,
    )
    backend, tuning = choose_backend(call, implementation)
    if isinstance(cache, UnifiedCache) and cache.table.num_shared:
        shared = attend_to_shared(inputs, call, cache, device)
        output, lse = backend.load().attend(inputs._replace(sinks=None), call, tuning)
        output, lse = merge(shared, (output.astype(call.softmax_dtype), lse))
        if inputs.sinks is not None:
            output, lse = add_sinks((output, lse), inputs.sinks)
        output = output.astype(call.dtype)
    else:
        output, lse = backend.load().attend(inputs, call, tuning)
    return (output, lse) if return_lse else output
