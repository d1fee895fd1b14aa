"""A recipe: our kernels in bonsai's Qwen 3 (`bonsai.models.qwen3`). Copy it.

It replaces the attention layer and calls a private function of bonsai's commit 3628425. bonsai.md says what is served.

Bonsai's models that hold a `flax.nnx.MultiHeadAttention` need no adapter: `layers.attention_fn` serves them.

Shapes: B batch, T new tokens, S slots of the cache, D width, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels import CausalMask, Tuning, dot_product_attention

TRIED_WITH = "3628425"
"""The commit of jax-ml/bonsai whose private name this is."""
_ADAPTED = "bonsai.models.qwen3.modeling.Attention"


def use_kernels(model: Any, *, implementation: str | Tuning | None = None) -> None:
    """Replaces the attention of each layer of a bonsai `Qwen3`, in place.

    Args:
      model: a `bonsai.models.qwen3.modeling.Qwen3`; its state keeps its names, so checkpoints load as before.
      implementation: our backend, by name or as a tuning object; None: the fastest that serves the call.

    Raises:
      ValueError: another model of bonsai's.

    Source: https://github.com/jax-ml/bonsai, bonsai/models/qwen3/modeling.py
    """
    layers = list(getattr(model, "layers", ()))
    found = {_full_name(getattr(layer, "attn", layer)) for layer in layers} or {_full_name(model)}
    if found != {_ADAPTED}:
        raise ValueError(
            f"expected a model whose layers have an `attn` of {_ADAPTED}, got {', '.join(sorted(found))}; of bonsai's "
            "other models, those with nnx.MultiHeadAttention take layers.attention_fn"
        )
    for layer in layers:
        layer.attn = Qwen3Attention(layer.attn, implementation)


class Qwen3Attention(nnx.Module):
    """Bonsai's own attention, computed in memory proportional to S.

    A token with nothing to attend to, such as padding on the right, attends to nothing: bonsai's attends to every
    slot of the cache alike.

    Args:
      attention: bonsai's, whose parameters this one shares.
      implementation: attention backend.
    """

    def __init__(self, attention: Any, implementation: str | Tuning | None):
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.q_norm, self.k_norm = attention.o_proj, attention.q_norm, attention.k_norm
        self.shd_cfg, self.scale, self.head_dim = attention.shd_cfg, attention.scale, attention.head_dim
        self.modeling = type(attention).__module__
        self.implementation = implementation

    def __call__(self, x: Float[Array, "B T D"], cache: Any, segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Writes keys and values to the cache, and attends to it.

        Args:
          x: hidden states.
          cache: a `LayerCache`, which moves on by T.
          segment_ids: 1 for tokens, 0 for padding on the left.

        Returns:
          Laid out as x.
        """
        bonsai = importlib.import_module(self.modeling)
        split = self.shd_cfg.act_btnh
        if split is not None and (split[1] or split[3]):
            raise ValueError(f"expected act_btnh to split batch and heads alone, got {split}")
        num_tokens, start = x.shape[1], cache.cur_ind[...]

        left_pads = bonsai.count_left_pads(segment_ids)
        if split is not None:
            left_pads = bonsai.shard(left_pads, jax.P(split[0]))
        cache.start_ind.set_value(jnp.where(cache.start_ind[...] < 0, left_pads, cache.start_ind[...]))
        sin, cos = bonsai._generate_pos_embeddings(
            bonsai.compute_positions_from_segment_ids(segment_ids) + start, self.head_dim
        )
        query = bonsai.apply_rope(self.q_norm(self.q_proj(x, out_sharding=split)), sin, cos)
        key = bonsai.apply_rope(self.k_norm(self.k_proj(x, out_sharding=split)), sin, cos)
        for cached, new in ((cache.k_cache, key), (cache.v_cache, self.v_proj(x, out_sharding=split))):
            cached.set_value(jax.lax.dynamic_update_slice(cached[...], new.astype(cached.dtype), (0, start, 0, 0)))

        slots = jnp.arange(cache.size)
        is_written = (slots >= cache.start_ind[...][:, None]) & (slots < start + num_tokens)
        keys, values = cache.k_cache[...], cache.v_cache[...]
        positions = jnp.broadcast_to(start + jnp.arange(num_tokens, dtype=jnp.int32), segment_ids.shape)
        if split is not None:
            positions = bonsai.shard(positions, jax.P(split[0]))

        def attend(*arrays: jax.Array) -> jax.Array:
            query, keys, values, segment_ids, key_ids, positions = arrays
            return dot_product_attention(
                query,
                keys,
                values,
                CausalMask(),
                query_segment_ids=segment_ids,
                key_value_segment_ids=key_ids,
                query_positions=positions,
                scale=self.scale,
                implementation=self.implementation,
            )

        if split is not None and (split[0] or split[2]):
            heads, tokens = jax.P(split[0], None, split[2]), jax.P(split[0])
            # Kernels don't say over which mesh axes their outputs vary.
            attend = jax.shard_map(attend, in_specs=(heads,) * 3 + (tokens,) * 3, out_specs=heads, check_vma=False)
        key_ids = is_written.astype(segment_ids.dtype)
        out = attend(query.astype(keys.dtype), keys, values, segment_ids, key_ids, positions)
        cache.cur_ind.set_value(start + num_tokens)
        return self.o_proj(out, out_sharding=self.shd_cfg.act_btd)


def _full_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
