"""Our kernels under MaxText's models: an `apply_attention` that replaces `AttentionOp`'s own.

Shapes: B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, Mask, Tuning
from layers.adapters.shards import attend_in_shards, refuse


# The parameters are MaxText's, in its order, under its names.
def apply_attention(
    self: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    decoder_segment_ids: Int[Array, "B T"] | None,
    segment_positions: Int[Array, "B T"] | None,
    lengths: Array | None,
    model_mode: str,
    use_ragged_attention: bool = False,
    previous_chunk: Any = None,
    bidirectional_mask: Any = None,
    sinks: Float[Array, " N"] | None = None,
    indexer_mask: Array | None = None,
    compressed_mask: Array | None = None,
    record_max_logits: bool = False,
    decoder_segment_ids_kv: Int[Array, "B S"] | None = None,
    pad_kv_total: int = 0,
    compress_ratio: int = 0,
    *,
    qk_product_einsum: Any,
    wv_product_einsum: Any,
    implementation: str | Tuning | None = None,
) -> tuple[Float[Array, "B T N V"], None, None]:
    """`AttentionOp.apply_attention` of `maxtext.layers.attention_op` in O(T) memory, or a refusal.

    Training and prefill, for the attention types global, local_sliding, chunk, full and mla; heads and batch may be
    split over the mesh.

    Args:
      self: an `AttentionOp` whose `attention_kernel` is "autoselected".
      query: has been scaled, as always in MaxText.
      key, value: of K heads, N a multiple of K; not quantised.
      decoder_segment_ids: document of each token; keys of a negative document are hidden from all.
      decoder_segment_ids_kv: those of the keys; None: `decoder_segment_ids`.
      segment_positions: no mask of MaxText's depends on it unless sequences are split.
      model_mode: "train" or "prefill".
      sinks: one logit for each query head.
      previous_chunk, bidirectional_mask, indexer_mask, compressed_mask, record_max_logits, pad_kv_total,
        compress_ratio: must be left out.
      lengths, use_ragged_attention: belong to decoding, which is refused.
      qk_product_einsum, wv_product_einsum: `jnp.einsum`.
      implementation: our backend, by name or as a tuning object; None: the fastest that serves the call. Not one of
        MaxText's arguments: set it by `functools.partialmethod`.

    Returns:
      The output, which is normalised, in the query's dtype; and None twice, as from MaxText's flash attention. A query
      with nothing to attend to gives 0, where MaxText's gives the mean of all values.

    Raises:
      ValueError: for what the kernels can't do, with the reason and the way round.

    Source: https://github.com/AI-Hypercomputer/maxtext, src/maxtext/layers/attention_op.py
    """
    _refuse_layer(self)
    refuse(
        {
            "model_mode": model_mode not in ("train", "prefill")
            and f"{model_mode!r} needs the unnormalised parts of two caches; decode with MaxText's own attention",
            "previous_chunk": previous_chunk is not None and "chunked prefill isn't served; prefill at once",
            "bidirectional_mask": bidirectional_mask is not None
            and "a mask of tokens that the data decides isn't a mask of positions",
            "indexer_mask": indexer_mask is not None and "it is a T×T array",
            "compressed_mask": compressed_mask is not None and "it is an array of queries × blocks of keys",
            "record_max_logits": record_max_logits and "logits are never stored; turn QK-clip off",
            "pad_kv_total": pad_kv_total != 0 and "keys that pad must be hidden, and no argument says which they are",
            "compress_ratio": compress_ratio != 0 and "compressed attention isn't served",
            "kv_quant": any(einsum is not jnp.einsum for einsum in (qk_product_einsum, wv_product_einsum))
            and "the kernels take no quantised keys and values; set quantize_kvcache=False",
        }
    )
    batch_axes, head_axes = _split_axes(self)
    dtype = jnp.result_type(query, key, value)
    out = attend_in_shards(
        self.mesh,
        batch_axes,
        head_axes,
        query.astype(dtype),
        key.astype(dtype),
        value.astype(dtype),
        _mask(self),
        **_segment_ids(decoder_segment_ids, decoder_segment_ids_kv),
        sinks=sinks,
        scale=1.0,
        logits_soft_cap=self.attn_logits_soft_cap or None,  # 0 turns it off in MaxText, as None does
        implementation=implementation,
    )
    return out.astype(query.dtype), None, None


def _refuse_layer(op: Any) -> None:
    """Refuses settings of a layer, where `apply_attention` refuses arguments of a call."""
    refuse(
        {
            "attention": op.attention_kernel != "autoselected"
            and f"{op.attention_kernel!r} names one of MaxText's own kernels; set attention=autoselected",
            "dropout_rate": op.dropout_rate > 0.0 and "attention weights are never stored; set it to 0",
            "matmul_precision": op.config.matmul_precision != "default"
            and "the kernels have their own; set it to default",
            "moba": op.config.moba and "its mask depends on keys and queries",
            "use_mla_absorbed_mqa": op.is_absorbed_mqa and "its layout on the mesh is another one; set it to False",
        }
    )


def _mask(op: Any) -> Mask:
    # By name: an enumeration of MaxText's isn't to be imported.
    kind = op.attention_type.value
    if kind == "local_sliding":
        return CausalMask() & LocalMask(_given(op, "sliding_window_size") - 1, 0)
    if kind == "chunk":
        return ChunkedCausalMask(_given(op, "chunk_attn_window_size"))
    if kind in ("global", "mla"):
        return CausalMask()
    if kind == "full":
        return FullMask()
    raise ValueError(
        f"expected attention_type global, local_sliding, chunk, full or mla, got {kind}; leave layers of that type to "
        "MaxText's own attention"
    )


def _given(op: Any, name: str) -> int:
    value = getattr(op, name)
    if value is None:
        raise ValueError(f"attention_type {op.attention_type.value} needs {name}, got None; set it in the config")
    return value


def _segment_ids(query_ids: jax.Array | None, key_ids: jax.Array | None) -> dict[str, Any]:
    if query_ids is None:
        refuse({"decoder_segment_ids_kv": key_ids is not None and "decoder_segment_ids must come with it"})
        return {}
    key_ids = query_ids if key_ids is None else key_ids
    # Keys of a negative document are hidden from all, those of its own document too.
    return {
        "query_segment_ids": query_ids,
        "key_value_segment_ids": jnp.where(key_ids < 0, jnp.iinfo(key_ids.dtype).min, key_ids),
    }


def _split_axes(op: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that split the batch and the heads, by MaxText's current logical rules."""

    def of(names: Any) -> list[tuple[str, ...]]:
        entries = [() if entry is None else entry for entry in op._logical_to_mesh_axes(names)]
        split = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]
        return [tuple(axis for axis in axes if op.mesh.shape.get(axis, 1) > 1) for axes in split]

    batch, heads, *query_axes = of(op.flash_axis_names_q)
    kv_batch, kv_heads, *key_axes = of(op.flash_axis_names_kv)
    if split := sorted({axis for axes in (*query_axes, *key_axes) for axis in axes}):
        raise ValueError(
            f"the mesh's {', '.join(split)} splits tokens or head features, and this adapter splits batch and heads "
            "alone; set its size to 1"
        )
    if (batch, heads) != (kv_batch, kv_heads):
        raise ValueError(
            f"expected queries and keys split alike, got batch over {batch} and {kv_batch}, heads over {heads} and "
            f"{kv_heads}; change logical_axis_rules"
        )
    return batch, heads
