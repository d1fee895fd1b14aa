"""A recipe: our kernels in levanter's models. Copy it.

It was tried with marin-levanter 0.2.227.dev40316220070. levanter.md says what is served.

Shapes: B batch, T query length, S key length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import haliax
import jax
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec as P

import kernels

TRIED_WITH = "0.2.227.dev40316220070"
"""The version of marin-levanter whose arguments these are."""

_SERVED_OF_MASKS = ("is_causal", "sliding_window", "segment_ids")


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    attention_dtype: Any = None,
    inference: bool = True,
    prng: Any = None,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    implementation: Any = None,
    **others: Any,
) -> Any:
    """`levanter.layers.attention.dot_product_attention` in memory proportional to T, or a refusal."""
    for name, given in others.items():
        if not (given is None or (name == "dropout" and (inference or not given))):
            raise ValueError(f"the kernels can't honour {name}={given}; leave it None (dropout: 0.0) in the config")
    batch, *_ = query.axes
    queries, keys, features = query.resolve_axis(QPos), key.resolve_axis(KPos), query.resolve_axis(Key)
    kv_heads = [axis for axis in key.axes if axis not in (batch, keys, features)]
    heads = [*kv_heads, *(axis for axis in query.axes if axis not in (batch, queries, features, *kv_heads))]
    static_mask, segment_ids = _read_mask(mask, batch, queries, keys)

    def to_array(named: Any, position: Any, heads: list[Any]) -> jax.Array:
        array = named.rearrange((batch, position, *heads, features)).array
        return array.astype(attention_dtype or query.dtype).reshape(batch.size, position.size, -1, features.size)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: dict[str, jax.Array]) -> jax.Array:
        options = {"scale": scaling_factor, "logits_soft_cap": logits_soft_cap, "implementation": implementation}
        return kernels.dot_product_attention(query, key, value, static_mask, **segment_ids, **options)

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        split = {axis.name: physical_axis_name(axis) for axis in (*query.axes, keys)}
        whole = [axis.name for axis in (queries, keys, features, *heads[1:]) if _size(mesh, split[axis.name]) > 1]
        if whole:
            raise ValueError(
                f"expected a mesh that splits batch and key/value heads alone, got one that splits {whole}"
            )
        spec = P(split[batch.name], None, split[kv_heads[0].name] if kv_heads else None)
        specs = (spec, spec, spec, P(split[batch.name]))
        attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    out = attend(
        to_array(query, queries, heads), to_array(key, keys, kv_heads), to_array(value, keys, kv_heads), segment_ids
    )
    axes = (batch, queries, *heads, features)
    named = haliax.named(out.astype(query.dtype).reshape([axis.size for axis in axes]), axes)
    return named.rearrange((*(axis for axis in query.axes if axis != features), features))


def _read_mask(mask: Any, batch: Any, queries: Any, keys: Any) -> tuple[kernels.Mask, dict[str, jax.Array]]:
    if mask is None:
        return kernels.FullMask(), {}
    fields = [field.name for field in dataclasses.fields(mask)] if hasattr(mask, "is_causal") else []
    given = [name for name in fields if getattr(mask, name) is not None and getattr(mask, name) is not False]
    if not fields or not set(given) <= set(_SERVED_OF_MASKS):
        raise ValueError(f"expected an AttentionMask of {_SERVED_OF_MASKS} alone, got {given or 'a dense mask'}")
    parts: list[kernels.Mask] = [kernels.CausalMask() if mask.is_causal else kernels.FullMask()]
    if mask.sliding_window is not None:
        parts.append(kernels.LocalMask(mask.sliding_window - 1, 0))
    segment_ids = {}
    for name, ids, axis in zip(("query", "key_value"), mask.segment_ids or (), (queries, keys), strict=False):
        # Levanter gives keys the ids of queries, under the queries' axis.
        ids = ids.rename({queries.name: axis.name}) if queries.name in [had.name for had in ids.axes] else ids
        segment_ids[f"{name}_segment_ids"] = ids.broadcast_axis(batch).rearrange((batch, axis)).array
    return functools.reduce(operator.and_, parts), segment_ids


def _size(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
