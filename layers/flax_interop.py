"""The kernels inside Flax's own attention modules, which stay as they are.

Shapes: *batch any leading dims, B their product, T query length, S key/value length, N query heads, K key/value heads,
H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from kernels import Bounds, CausalMask, FullMask, Mask, MultiHeadMask, NumpyMask, Tuning, dot_product_attention
from kernels.arguments.instead import OF_MASKS, instead_of
from kernels.arguments.static_numbers import checked_scale, checked_soft_cap
from kernels.masks.algebra import NO_BIAS, is_bias

_PADDING = "a boolean mask over keys, of shape [batch, 1, 1, kv_length], given to the Flax module's own call as mask="
_OF_LENGTHS = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), f"use {_PADDING}")


@instead_of(**OF_MASKS, **_OF_LENGTHS)
def attention_fn(
    mask: Mask | None = None,
    *,
    implementation: str | Tuning | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
) -> FlaxAttention:
    """Makes an `attention_fn` for `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`.

    Args:
      mask: a mask from `kernels`; None: all pairs are allowed, but for the Flax module's own `mask`.
      implementation: attention backend, by name or as a tuning object; None: the fastest that serves the call.
      logits_soft_cap: logits become cap * tanh(logits / cap); None: as they are.
      scale: factor on the logits; None: 1 / √head_dim, as Flax.

    Returns:
      A function with Flax's own signature. Two made with equal arguments are equal, so swapping one for the other
      recompiles nothing.

    Raises:
      ValueError: a mask that isn't from `kernels`, or a scale or soft cap that isn't a finite number.

    Example:
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(4, 64, decode=False, attention_fn=attention_fn(CausalMask()), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 128, 64))).shape
      (2, 128, 64)
    """
    return FlaxAttention(mask, implementation, logits_soft_cap, scale)


@dataclass(frozen=True)
class FlaxAttention:
    """A `flax.nnx.dot_product_attention` on our kernels; made by `attention_fn`, which documents the fields."""

    mask: Mask | None
    implementation: str | Tuning | None
    logits_soft_cap: float | None
    scale: float | None

    def __post_init__(self):
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise ValueError(
                f"attention_fn takes a kernels mask such as CausalMask(), got {type(self.mask).__name__}; "
                + (NO_BIAS if is_bias(self.mask) else "a dense mask goes to the Flax module's own call, as mask=")
            )
        # As Python numbers: two functions made with equal numbers are to be equal, whatever type these came in.
        object.__setattr__(self, "logits_soft_cap", checked_soft_cap(self.logits_soft_cap))
        object.__setattr__(self, "scale", checked_scale(self.scale))

    # linen hands over only the arguments that it finds by name in this signature, so whatever can change the result
    # must be listed, or it would be ignored silently.
    @instead_of(local_window_size="use attention_fn(mask=LocalMask(left, right))", **_OF_LENGTHS)
    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K H"],
        bias: Array | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: jnp.dtype | None = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Any] | None = None,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
        input_positions: Array | None = None,
        bounds: Bounds | None = None,
    ) -> Float[Array, "*batch T N H"]:
        """Attends as Flax's own function does, in memory proportional to T, or refuses.

        Args:
          query, key, value: any number of leading batch dims.
          mask: Flax's dense mask, booleans or 0 and 1, broadcastable to [*batch, N, T, S]. A mask over keys alone,
            [*batch, 1, 1, S], is honoured in O(S) memory: so are key padding and `decode=True`. Any other must be a
            concrete array, the same for the whole batch: it exists T×T already, and becomes a `NumpyMask`.
          is_causal: adds `CausalMask()`.
          dtype: type to compute in; None: the inputs' common type.
          broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout must be off.
          force_fp32_for_softmax: holds anyway.
          precision: any `jax.lax.Precision`, which asks for no more than the kernels do: they multiply float32 in full.
          bias, module, promote_dtype, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum,
            input_positions: must be left out.
          bounds: the keys that each query may attend to, as data: `[*batch, T]` or `[T]`, and so for keys. Flax's
            modules don't hand them over: give them `functools.partial(attention_fn(mask), bounds=bounds)`.

        Returns:
          Laid out as the query. A query with nothing to attend to gives 0, where Flax gives the mean of all values.

        Raises:
          ValueError: for what the kernels can't do, with the reason and the way round; for arrays that don't fit
            together.
        """
        _check_shapes(query, key, value)
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        no_einsum = "the kernels have no einsum to replace; leave it out"
        no_weights = "sow_weights=True asks for the attention weights, a T×T array that never exists; leave it False"
        no_positions = "rotary embedding isn't part of this function; use layers.Attention, which has it"
        no_algorithm = (
            "the kernels take a jax.lax.Precision, since they multiply float32 in full, and no other algorithm; leave "
            "precision=None in the module and, for the matmuls around them, set jax.default_matmul_precision"
        )
        for name, given, reason in (
            ("bias", bias, NO_BIAS),
            ("module", module, no_weights),
            ("precision", None if _is_precision(precision) else precision, no_algorithm),
            ("promote_dtype", promote_dtype, "types are promoted by jnp.result_type; set the module's dtype instead"),
            ("einsum_dot_general", einsum_dot_general, no_einsum),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum, no_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum, no_einsum),
            ("input_positions", input_positions, no_positions),
        ):
            if given is not None:
                raise ValueError(f"attention_fn can't honour {name}={_brief(given)}: {reason}")
        if dropout_rate > 0.0 and not deterministic:
            raise ValueError(
                f"dropout_rate={dropout_rate} with deterministic=False asks for dropout of attention weights, which "
                "are never stored; set dropout_rate=0.0 in the module and apply dropout to its output"
            )

        *batch, query_length, num_heads, _ = query.shape
        key_length = key.shape[-3]
        static_mask = FullMask() if self.mask is None else self.mask
        static_mask = static_mask & CausalMask() if is_causal else static_mask
        _check_decoding(static_mask, bounds, query_length, key_length)
        dense_mask, segment_ids = _read_mask(mask, (*batch, num_heads, query_length, key_length))
        query, key, value = (
            array.astype(dtype).reshape(math.prod(batch), *array.shape[-3:]) for array in (query, key, value)
        )
        out = dot_product_attention(
            query,
            key,
            value,
            static_mask if dense_mask is None else static_mask & dense_mask,
            **segment_ids,
            bounds=_with_one_batch_dim(bounds, math.prod(batch)),
            scale=self.scale,
            logits_soft_cap=self.logits_soft_cap,
            implementation=self.implementation,
        )
        return out.reshape(*batch, *out.shape[1:])


def _with_one_batch_dim(bounds: Bounds | None, batch: int) -> Bounds | None:
    def reshaped(bound: Array) -> Array:
        return bound.reshape(batch, bound.shape[-1]) if bound.ndim > 2 else bound

    return jax.tree.map(reshaped, bounds)


def _check_decoding(mask: Mask, bounds: Bounds | None, query_length: int, key_length: int) -> None:
    # Flax doesn't say where in its cache the query stands, so a mask on positions has no answer, nor have bounds.
    if query_length == 1 and key_length > 1 and bounds is not None:
        raise ValueError(
            f"one query against {key_length} keys is a decoding step, for which Flax doesn't give the query's index, "
            "so bounds can't be applied; leave them out"
        )
    if query_length == 1 and key_length > 1 and mask != FullMask():
        raise ValueError(
            f"one query against {key_length} keys is a decoding step, for which Flax doesn't give the query's "
            f"position, so {mask!r} can't be applied; decode with attention_fn(mask=None) and "
            "is_causal=False, where Flax masks the unwritten part of its cache"
        )


def _is_precision(precision: Any) -> bool:
    """True for a `jax.lax.Precision`, or a pair of them: the kernels are as precise as any."""
    try:
        for each in precision if isinstance(precision, tuple | list) else (precision,):
            jax.lax.Precision(each)
    except ValueError:  # an algorithm, or nothing that JAX knows
        return False
    return True


def _read_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> tuple[Mask | None, dict[str, Any]]:
    """Flax's dense mask as a mask object, or as segment ids if it hides keys alone; `shape` is that of the logits."""
    if mask is None:
        return None, {}
    *batch, num_heads, query_length, key_length = shape
    mask = _checked_mask(mask, shape)
    if mask.shape[-3:-1] != (1, 1):
        return _static_mask(mask, query_length, key_length, num_heads), {}
    # Key padding as documents: all queries are in document 1, with the keys that they may see.
    keys_allowed = jnp.broadcast_to(mask[..., 0, 0, :] != 0, (*batch, key_length))
    key_ids = keys_allowed.reshape(-1, key_length).astype(jnp.int32)
    query_ids = jnp.ones((key_ids.shape[0], query_length), jnp.int32)
    return None, {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}


def _static_mask(mask: Array | np.ndarray, query_length: int, key_length: int, num_heads: int) -> Mask:
    """Turns a concrete dense mask into a mask object, one per head if heads differ."""
    remedy = (
        "describe it by a mask object, attention_fn(mask=CausalMask() & LocalMask(1023, 0)), or pass padding over keys "
        "alone, of shape [batch, 1, 1, kv_length]"
    )
    if isinstance(mask, jax.core.Tracer):
        raise ValueError(f"a traced dense mask of shape {mask.shape} would need a T×T array: {remedy}")
    dense = np.asarray(mask) != 0
    dense = dense.reshape(-1, *dense.shape[-3:])
    if not (dense == dense[:1]).all():
        raise ValueError(
            f"a dense mask of shape {mask.shape} that differs within the batch would need a T×T array per sequence: "
            f"{remedy}"
        )
    heads = np.broadcast_to(dense[0], (dense.shape[1], query_length, key_length))
    if (heads == heads[:1]).all():
        return NumpyMask(heads[0])
    return MultiHeadMask([NumpyMask(head) for head in np.broadcast_to(heads, (num_heads, query_length, key_length))])


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError for shapes that Flax refuses, too, and for batch dims that can't be merged into one."""
    got = f"query {query.shape}, key {key.shape}, value {value.shape}"
    expected = "expected [*batch, T, N, H], [*batch, S, K, H], [*batch, S, K, V]"
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(f"query, key and value must have the same rank, of 3 or more: {got}; {expected}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"the batch dims of query, key and value must match: {got}; {expected}")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"key and value lengths must match: {got}; {expected}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key depths must match: {got}; {expected}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value heads must match: {got}; {expected}")
    if not key.shape[-2] or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"the number of query heads must be a multiple of that of key and value heads: {got}")


def _checked_mask(mask: ArrayLike, shape: tuple[int, ...]) -> Array | np.ndarray:
    """A dense mask with as many dims as the logits, to whose shape it broadcasts."""
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    fits = all(size in (1, wanted) for size, wanted in zip(mask.shape[::-1], shape[::-1], strict=False))
    if mask.ndim > len(shape) or not fits:
        raise ValueError(
            f"expected a mask that broadcasts to [*batch, num_heads, q_length, kv_length] = {list(shape)}, got shape "
            f"{mask.shape}"
        )
    if is_bias(mask) and not isinstance(mask, jax.core.Tracer):
        known = np.asarray(mask)
        if not ((known == 0) | (known == 1)).all():
            raise ValueError(f"mask holds other floats than 0 and 1, so it is a bias: {NO_BIAS}. Padding is {_PADDING}")
    return mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)


def _brief(value: Any) -> str:
    if isinstance(value, str | jax.lax.Precision):
        return repr(value)
    return f"<{type(value).__name__}{f' of shape {value.shape}' if hasattr(value, 'shape') else ''}>"
