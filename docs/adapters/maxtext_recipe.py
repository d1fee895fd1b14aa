"""A recipe: our kernels in MaxText's models. Copy it.

It calls a private method of maxtext 0.2.5. maxtext.md says what is served.

Shapes: B batch, T query length, S key length, N query heads, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, Mask, dot_product_attention

TRIED_WITH = "0.2.5"
"""The version of maxtext whose private name this is."""


def apply_attention(
    self: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    decoder_segment_ids: Int[Array, "B T"] | None,
    segment_positions: Any,
    lengths: Any,
    model_mode: str,
    *,
    decoder_segment_ids_kv: Int[Array, "B S"] | None = None,
    qk_product_einsum: Any,
    wv_product_einsum: Any,
    implementation: Any = None,
    **others: Any,
) -> tuple[Float[Array, "B T N V"], None, None]:
    """`AttentionOp.apply_attention` of `maxtext.layers.attention_op` in O(T) memory, or a refusal."""
    for name, given, served in (
        ("model_mode", model_mode, ("train", "prefill")),
        ("attention", self.attention_kernel, ("autoselected",)),
        ("dropout_rate", self.dropout_rate, (0.0,)),
        ("matmul_precision", self.config.matmul_precision, ("default",)),
        ("moba", self.config.moba, (False,)),
        ("is_absorbed_mqa", self.is_absorbed_mqa, (False,)),
        ("qk_product_einsum", qk_product_einsum, (jnp.einsum,)),
        ("wv_product_einsum", wv_product_einsum, (jnp.einsum,)),
        *((name, given, (None, False, 0)) for name, given in others.items()),
    ):
        if not any(given is value or (isinstance(given, str | int | float) and given == value) for value in served):
            raise ValueError(f"the kernels can't honour {name}={given}; expected {' or '.join(map(str, served))}")
    batch, heads, *rest = [_axes(entry) for entry in self._logical_to_mesh_axes(self.flash_axis_names_q)]
    if math.prod(self.mesh.shape[axis] for axes in rest for axis in axes) > 1:
        raise ValueError(f"expected a mesh that splits batch and heads alone, got {dict(self.mesh.shape)}")
    segment_ids = {}
    if decoder_segment_ids is not None:
        key_ids = decoder_segment_ids if decoder_segment_ids_kv is None else decoder_segment_ids_kv
        # MaxText hides keys of negative documents from all, those of their own document too.
        key_ids = jnp.where(key_ids < 0, jnp.iinfo(key_ids.dtype).min, key_ids)
        segment_ids = {"query_segment_ids": decoder_segment_ids, "key_value_segment_ids": key_ids}

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: dict[str, jax.Array]) -> jax.Array:
        return dot_product_attention(
            query,
            key,
            value,
            _mask(self),
            scale=1.0,  # MaxText scales queries before
            logits_soft_cap=self.attn_logits_soft_cap or None,
            implementation=implementation,
            **segment_ids,
        )

    spec = P(batch, None, heads)
    attend = jax.shard_map(
        attend, mesh=self.mesh, in_specs=(spec, spec, spec, P(batch)), out_specs=spec, check_vma=False
    )
    dtype = jnp.result_type(query, key, value)
    out = attend(query.astype(dtype), key.astype(dtype), value.astype(dtype), segment_ids)
    return out.astype(query.dtype), None, None


def _mask(op: Any) -> Mask:
    match op.attention_type.value:
        case "global" | "mla":
            return CausalMask()
        case "local_sliding" if op.sliding_window_size:
            return CausalMask() & LocalMask(op.sliding_window_size - 1, 0)
        case "chunk" if op.chunk_attn_window_size:
            return ChunkedCausalMask(op.chunk_attn_window_size)
        case "full":
            return FullMask()
    raise ValueError(
        f"expected attention_type global, mla, full, or local_sliding or chunk with its size, got {op.attention_type}"
    )


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
