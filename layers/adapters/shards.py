"""Shared by the adapters: refusals, and an attention call on a mesh that splits batch and heads, but no sequence.

Shapes: B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels import Mask, dot_product_attention


def refuse(reasons: Mapping[str, str | bool]) -> None:
    """Raises ValueError for the first argument that has a reason why the kernels can't honour it."""
    for name, reason in reasons.items():
        if reason:
            raise ValueError(f"the kernels can't honour {name}: {reason}")


def attend_in_shards(
    mesh: Mesh | AbstractMesh | None,
    batch_axes: Iterable[str],
    head_axes: Iterable[str],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    mask: Mask,
    *,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    **options: Any,
) -> Float[Array, "B T N V"]:
    """`kernels.dot_product_attention` of each device's part of the batch and of the heads.

    Args:
      mesh: the devices; None: one.
      batch_axes: mesh axes that split B.
      head_axes: mesh axes that split N and K.
      query, key, value, mask, query_segment_ids, key_value_segment_ids, query_positions, sinks: as for
        `kernels.dot_product_attention`.
      options: `scale`, `logits_soft_cap`, `implementation`.

    Returns:
      Laid out as the query.

    Raises:
      ValueError: if the axes don't divide B, N and K, or what `kernels.dot_product_attention` raises.
    """
    arrays = {
        "query_segment_ids": query_segment_ids,
        "key_value_segment_ids": key_value_segment_ids,
        "query_positions": query_positions,
        "sinks": sinks,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    sizes = {} if mesh is None else mesh.shape
    batch, heads = (tuple(axis for axis in axes if sizes.get(axis, 1) > 1) for axes in (batch_axes, head_axes))

    def attend(query, key, value, given):
        return dot_product_attention(query, key, value, mask, **given, **options)

    if not batch + heads:
        return attend(query, key, value, given)
    for what, size, axes in (
        ("batch size", query.shape[0], batch),
        ("number of query heads", query.shape[2], heads),
        ("number of key/value heads", key.shape[2], heads),
    ):
        if size % math.prod(sizes[axis] for axis in axes):
            split = " × ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ValueError(f"{what} {size} is not a multiple of the mesh's {split}; change one of them")
    token_spec, head_spec = PartitionSpec(batch), PartitionSpec(batch, None, heads)
    specs = {name: PartitionSpec(heads) if name == "sinks" else token_spec for name in given}
    # Kernels don't say over which mesh axes their outputs vary.
    return jax.shard_map(
        attend, mesh=mesh, in_specs=(head_spec, head_spec, head_spec, specs), out_specs=head_spec, check_vma=False
    )(query, key, value, given)
