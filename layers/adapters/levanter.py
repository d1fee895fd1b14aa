"""Our kernels under levanter's models: a `dot_product_attention` with the arguments of levanter's own.

Shapes: B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import CausalMask, FullMask, LocalMask, Mask, Tuning
from layers.adapters.shards import attend_in_shards, refuse

_MASK_FIELDS = {
    "is_causal",
    "causal_offset",
    "explicit_mask",
    "segment_ids",
    "sliding_window",
    "bidirectional_window",
}


# The parameters are levanter's, in its order, under its names.
def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: Any = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Any = None,
    attn_sink: Any = None,
    implementation: str | Tuning | None = None,
) -> Any:
    """`levanter.layers.attention.dot_product_attention` in memory proportional to T, or a refusal.

    Args:
      QPos, KPos: axes of queries and of keys, or their names.
      Key: axis of head features, or its name, in query, key and value alike.
      query: a NamedArray of QPos, Key, batch axes and head axes.
      key, value: NamedArrays of KPos, Key, the batch axes, and those of the head axes that aren't a group's.
      mask: an `AttentionMask` without an explicit part; None: everyone attends to everyone.
      bias, precision, flash_block_size: must be left out.
      attention_dtype: type of the operands; logits, softmax and sums are float32 at least.
      use_flash: True or None.
      attn_backend: None or "default".
      dropout, inference, prng: dropout must be off.
      logits_soft_cap: logits become cap * tanh(logits / cap).
      scaling_factor: a Python number; None: 1/√H.
      attn_sink: a NamedArray of head axes: one logit for each query head.
      implementation: our backend, by name or as a tuning object; None: the fastest that serves the call. Not one of
        levanter's arguments: set it by `functools.partial`.

    Returns:
      A NamedArray with the query's axes and dtype. A query with nothing to attend to gives 0, where levanter's gives
      the mean of all values.

    Raises:
      ValueError: for what the kernels can't do, with the reason and the way round.

    Source: https://github.com/marin-community/marin, lib/levanter/src/levanter/layers/attention.py
    """
    refuse(
        {
            "bias": bias is not None and "the kernels take no dense bias; use a mask, logits_soft_cap or attn_sink",
            "precision": precision is not None
            and "the kernels have their own; leave it None and set jax.default_matmul_precision for the matmuls around",
            "use_flash": use_flash is False
            and "it asks for dense attention; set use_flash_attention=None in the config",
            "attn_backend": attn_backend not in (None, "default")
            and "it names one of levanter's own; set attn_backend=None in the config, and implementation= here",
            "flash_block_size": flash_block_size is not None
            and "it tunes levanter's own kernels; set flash_attention_block_size=None in the config, and a tuning "
            "object as implementation= here",
            "dropout": dropout > 0.0
            and not inference
            and "attention weights are never stored; set attn_pdrop=0.0 in the config",
        }
    )
    axes = _Axes.of(query, key, value, QPos, KPos, Key, mask, attn_sink)
    static_mask, arrays = _read_mask(mask, axes)
    if attn_sink is not None:
        arrays["sinks"] = _array(attn_sink, axes.heads, "attn_sink").reshape(-1)
    dtype = jnp.result_type(query.dtype, key.dtype, value.dtype) if attention_dtype is None else attention_dtype
    mesh, batch_axes, head_axes = axes.split_over()
    out = attend_in_shards(
        mesh,
        batch_axes,
        head_axes,
        axes.flatten(query, axes.query, axes.heads, "query").astype(dtype),
        axes.flatten(key, axes.key, axes.shared_heads, "key").astype(dtype),
        axes.flatten(value, axes.key, axes.shared_heads, "value").astype(dtype),
        static_mask,
        scale=scaling_factor,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
        **arrays,
    )
    return axes.name_output(out.astype(query.dtype), query)


class _Axes(NamedTuple):
    """Haliax axes of a call, sorted by what they mean."""

    batch: tuple[Any, ...]
    shared_heads: tuple[Any, ...]
    groups: tuple[Any, ...]
    query: Any
    key: Any
    features: Any

    @property
    def heads(self) -> tuple[Any, ...]:
        """The query's head axes: heads that share one key/value head stand side by side."""
        return self.shared_heads + self.groups

    @staticmethod
    def of(query, key, value, QPos, KPos, Key, mask, attn_sink) -> _Axes:
        if isinstance(KPos, list | tuple):
            raise ValueError(f"expected one axis of keys, got KPos={KPos}; flatten them into one")
        q_axis, kv_axis, features = query.resolve_axis(QPos), key.resolve_axis(KPos), query.resolve_axis(Key)
        kv_names = {axis.name for axis in key.axes}
        if {axis.name for axis in value.axes} != kv_names or features.name not in kv_names:
            raise ValueError(
                f"expected key and value with the same axes, {features.name!r} among them, got {key.axes} and "
                f"{value.axes}"
            )
        free = [axis for axis in query.axes if axis not in (q_axis, features)]
        shared = [axis for axis in free if axis.name in kv_names]
        if stray := kv_names - {axis.name for axis in (*shared, kv_axis, features)}:
            raise ValueError(f"key and value have the axes {sorted(stray)}, which the query of {query.axes} lacks")
        # Both batch and key/value heads are in all three arrays. What a mask differs over is batch, what a sink differs
        # over are heads; without either, the query's first axis is its batch, as in levanter's own sorting.
        mask_names = {axis.name for named in _named_parts(mask) for axis in named.axes}
        sink_names = set() if attn_sink is None else {axis.name for axis in attn_sink.axes}
        batch = [a for a in shared if a.name in mask_names or (a == query.axes[0] and a.name not in sink_names)]
        if both := sink_names & {axis.name for axis in batch}:
            raise ValueError(f"attn_sink differs over {sorted(both)}, as the batch does; the kernels take one a head")
        heads = [axis for axis in shared if axis not in batch]
        groups = [axis for axis in free if axis not in shared]
        return _Axes(tuple(batch), tuple(heads), tuple(groups), q_axis, kv_axis, features)

    def flatten(self, named: Any, length: Any, heads: tuple[Any, ...], what: str) -> Float[Array, "B T N H"]:
        array = _array(named, (*self.batch, length, *heads, self.features), what)
        return array.reshape(_size(self.batch), length.size, _size(heads), self.features.size)

    def split_over(self) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        """The mesh, and its axes that split the batch and the heads, by haliax's current axis mapping."""
        from haliax.partitioning import _get_mesh, physical_axis_name

        def mesh_axes(axes: tuple[Any, ...]) -> tuple[str, ...]:
            named = [physical_axis_name(axis) or () for axis in axes]
            return tuple(part for entry in named for part in ((entry,) if isinstance(entry, str) else entry))

        mesh = _get_mesh()
        sizes = {} if mesh is None else mesh.shape
        for axis in (*self.groups, self.query, self.key, self.features):
            if split := [name for name in mesh_axes((axis,)) if sizes.get(name, 1) > 1]:
                raise ValueError(
                    f"the mesh's {', '.join(split)} splits {axis.name!r}; only batch and key/value heads can be split"
                )
        return mesh, mesh_axes(self.batch), mesh_axes(self.shared_heads)

    def name_output(self, out: jax.Array, query: Any) -> Any:
        import haliax

        ours = (*self.batch, self.query, *self.heads, self.features)
        theirs = (*(axis for axis in query.axes if axis != self.features), self.features)
        return haliax.named(out.reshape([axis.size for axis in ours]), ours).rearrange(theirs)


def _read_mask(mask: Any, axes: _Axes) -> tuple[Mask, dict[str, Any]]:
    """An `AttentionMask` as a kernels mask, and the segment ids and positions that it is evaluated on."""
    if mask is None:
        return FullMask(), {}
    if not hasattr(mask, "is_causal"):
        raise ValueError(
            f"a dense mask of axes {getattr(mask, 'axes', '?')} would need a T×T array; "
            "describe it by levanter.layers.attention.AttentionMask"
        )
    # A field that a later levanter adds may narrow the mask.
    for field in dataclasses.fields(mask):
        if field.name not in _MASK_FIELDS and getattr(mask, field.name) not in (None, False):
            raise ValueError(f"expected an AttentionMask of {sorted(_MASK_FIELDS)}, got one with {field.name}, too")
    if mask.explicit_mask is not None:
        refuse({"mask": "its explicit part is a T×T array; describe it by causal, sliding_window, segment_ids"})

    parts: list[Mask] = []
    arrays: dict[str, Any] = {}
    if mask.sliding_window is not None:
        parts.append(LocalMask(mask.sliding_window - 1, 0))
    if mask.bidirectional_window is not None:
        parts.append(LocalMask(mask.bidirectional_window, mask.bidirectional_window))
    if mask.is_causal:
        offset = mask.causal_offset
        if offset is None:
            parts.append(CausalMask())
        elif not offset.axes and not isinstance(offset.array, jax.core.Tracer):
            parts.append(CausalMask(int(offset.array)))
        elif parts:
            raise ValueError(
                "a causal_offset that is traced or differs within the batch moves the queries, and levanter's windows "
                "are counted from where they stood; leave out the offset or the window"
            )
        else:
            parts.append(CausalMask())
            moved = _array(offset, axes.batch, "causal_offset").reshape(-1, 1)
            arrays["query_positions"] = moved.astype(jnp.int32) + jnp.arange(axes.query.size, dtype=jnp.int32)
    if mask.segment_ids is not None:
        query_ids, key_ids = mask.segment_ids
        if any(axis.name == axes.query.name for axis in key_ids.axes):
            key_ids = key_ids.rename({axes.query.name: axes.key.name})
        for name, named, axis in (("query", query_ids, axes.query), ("key_value", key_ids, axes.key)):
            ids = _array(named, (*axes.batch, axis), f"{name}_segment_ids")
            arrays[f"{name}_segment_ids"] = ids.reshape(-1, axis.size)
    return functools.reduce(operator.and_, parts) if parts else FullMask(), arrays


def _named_parts(mask: Any) -> list[Any]:
    """The arrays of an `AttentionMask` that may differ within the batch."""
    if mask is None or not hasattr(mask, "is_causal"):
        return []
    parts = [mask.causal_offset, *(mask.segment_ids or ())]
    return [part for part in parts if part is not None]


def _array(named: Any, axes: tuple[Any, ...], what: str) -> jax.Array:
    """A NamedArray in the order of these axes, along which it is repeated where it lacks one."""
    if stray := {axis.name for axis in named.axes} - {axis.name for axis in axes}:
        raise ValueError(f"expected {what} of {[axis.name for axis in axes]} alone, got {sorted(stray)}, too")
    for axis in axes:
        if axis.name not in {had.name for had in named.axes}:
            named = named.broadcast_axis(axis)
    return named.rearrange(axes).array


def _size(axes: tuple[Any, ...]) -> int:
    return math.prod(axis.size for axis in axes)
