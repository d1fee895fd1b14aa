"""Multi-head self-attention as a Flax module.

Shapes: B batch, T tokens, W width, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels import (
    Bounds,
    CausalMask,
    FullMask,
    Mask,
    SlabCache,
    TokenTree,
    Tuning,
    decode_attention,
    dot_product_attention,
)
from kernels.arguments.bounds import checked_bounds
from kernels.arguments.instead import OF_MASKS, instead_of
from kernels.arguments.static_numbers import checked_scale, checked_soft_cap
from kernels.context import attend_over_mesh
from kernels.masks import require_mask
from kernels.masks.bounds import OF_KEYS, BoundName
from layers.activation_sharding import ActivationSharding
from layers.checks import check_choice, check_heads, check_implementation, rotary_dim
from layers.config import QKNorm
from layers.norm import RMSNorm
from layers.projections import project, project_back, small_init
from layers.rope_scaling import RopeScaling
from layers.rotary import Rotary, Rotation, make_rotation, rotate

_SEGMENT_IDS = "give the call segment_ids=segment_ids_of_lengths(lengths, T), from kernels, or those of documents"
_OF_LENGTHS = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "attention_mask"), _SEGMENT_IDS)


class Attention(nnx.Module):
    """Self-attention that never builds a T×T array: projections, rotary embedding and a kernel.

    Args:
      width: input and output features.
      num_heads: query heads.
      head_dim: features of a head; None: width / num_heads.
      num_kv_heads: key and value heads (arXiv:2305.13245); None: num_heads.
      mask: who may attend to whom, from `kernels`; None: everyone to everyone.
      rope_base: base of the rotary frequencies; None: no rotary embedding.
      rope_scaling: how rotary frequencies are scaled for a longer context.
      rope_fraction: part of each head's features that turns, from the first.
      attention_bias: add a bias to queries, keys and values.
      output_bias: add a bias to the output.
      qk_norm: RMS-normalise queries and keys: "per_head" over each head's features (arXiv:2302.05442), "whole" over
        those of all heads together (arXiv:2501.00656), or "none".
      qk_norm_after_rope: do so after the rotary embedding, not before it.
      query_scale: multiplies the logits; None: 1 / √head_dim.
      logits_soft_cap: logits become cap * tanh(logits / cap); None: as they are.
      sinks: learn a logit per head that takes part in the softmax and has no value (arXiv:2309.17453), starting at 0.
      implementation: attention backend of a call and of `prefill`, by name or as a tuning object; None: the fastest
        that serves the call.
      decode_implementation: the same for `decode`, which other backends serve (`kernels.decode_attention`).
      compute_dtype: type of the matmuls' operands and of the output, whatever the input's: float32 comes out as
        bfloat16 unless this says "float32".
      param_dtype: type that parameters are stored in.
      norm_epsilon: added to the mean square in QK-norm.
      norm_scale_offset: added to the scale in QK-norm.
      kernel_init: initialiser of the query, key and value projections; None: `small_init(width)`.
      output_kernel_init: initialiser of the output projection; None: `kernel_init`.
      activation_sharding: how the call is split over a mesh; None: on one device.
      rngs: source of the initial values.

    Raises:
      ValueError: for head counts or sizes that don't fit together, a soft cap that isn't a positive number, or a
        backend that there isn't.

    Example:
      >>> from kernels import LocalMask
      >>> layer = Attention(64, 4, mask=CausalMask() & LocalMask(1023, 0), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 2048, 64))).shape
      (2, 2048, 64)
      >>> layer(jnp.ones((2, 2048, 64))).dtype
      dtype(bfloat16)
    """

    @instead_of(**OF_MASKS, **_OF_LENGTHS)
    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        mask: Mask | None = CausalMask(),  # noqa: B008  (frozen)
        rope_base: float | None = 10_000.0,
        rope_scaling: RopeScaling = RopeScaling(),  # noqa: B008  (frozen)
        rope_fraction: float = 1.0,
        attention_bias: bool = False,
        output_bias: bool = False,
        qk_norm: QKNorm = "none",
        qk_norm_after_rope: bool = False,
        query_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        implementation: str | Tuning | None = None,
        decode_implementation: str | Tuning | None = None,
        compute_dtype: jnp.dtype | str = "bfloat16",
        param_dtype: jnp.dtype | str = "float32",
        norm_epsilon: float = 1e-6,
        norm_scale_offset: float = 0.0,
        kernel_init: nnx.Initializer | None = None,
        output_kernel_init: nnx.Initializer | None = None,
        activation_sharding: ActivationSharding | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if width < 1 or num_heads < 1:
            raise ValueError(f"width={width} and num_heads={num_heads} must be at least 1")
        if head_dim is None:
            if width % num_heads:
                raise ValueError(
                    f"width={width} is not a multiple of num_heads={num_heads}; change one of them, or give head_dim"
                )
            head_dim = width // num_heads
        check_heads(num_heads, num_kv_heads, head_dim, rope_base, rope_fraction)
        check_choice("qk_norm", qk_norm, QKNorm)
        if rope_base is not None:
            rope_scaling.check_rotary_dim(rotary_dim(head_dim, rope_fraction))
        mask = FullMask() if mask is None else mask
        require_mask(mask)
        mask.for_each_head(num_heads)  # refuses a mask of another number of heads

        self.mask = mask
        self.head_dim = head_dim
        self.rotary = None if rope_base is None else Rotary(head_dim, rope_base, rope_scaling, rope_fraction)
        self.query_scale = checked_scale(query_scale, "query_scale")
        self.logits_soft_cap = checked_soft_cap(logits_soft_cap)
        check_implementation(implementation, "attention", "implementation")
        check_implementation(decode_implementation, "decoding", "decode_implementation")
        self.implementation = implementation
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.decode_implementation = decode_implementation
        self.activation_sharding = activation_sharding

        kernel_init = kernel_init or small_init(width)
        projection = functools.partial(
            nnx.LinearGeneral,
            dtype=jnp.dtype(compute_dtype),
            param_dtype=jnp.dtype(param_dtype),
            rngs=rngs,
        )
        inner = functools.partial(projection, kernel_init=kernel_init, use_bias=attention_bias)
        self.query = inner(width, (num_heads, head_dim))
        self.key = inner(width, (num_kv_heads, head_dim))
        self.value = inner(width, (num_kv_heads, head_dim))
        self.output = projection(
            (num_heads, head_dim),
            width,
            axis=(-2, -1),
            kernel_init=output_kernel_init or kernel_init,
            use_bias=output_bias,
        )
        if qk_norm != "none":
            num_norms = (num_heads, num_kv_heads) if qk_norm == "whole" else (1, 1)
            self.query_norm, self.key_norm = (
                RMSNorm(num * head_dim, epsilon=norm_epsilon, scale_offset=norm_scale_offset, param_dtype=param_dtype)
                for num in num_norms
            )
        self.qk_norm = qk_norm
        self.qk_norm_after_rope = qk_norm_after_rope
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if sinks else None

    @instead_of(
        **OF_MASKS, **_OF_LENGTHS, mask="give the mask, from kernels, to the layer when it is made; " + _SEGMENT_IDS
    )
    def __call__(
        self,
        inputs: Float[Array, "B T W"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        rotation: Rotation | None = None,
        token_order: Int[Array, "B T"] | None = None,
        bounds: Bounds | None = None,
    ) -> Float[Array, "B T W"]:
        """Attends within each document.

        Args:
          inputs: any float type; computed in the compute dtype.
          segment_ids: document of each token; tokens attend within their own. None: one document per batch element.
          positions: each token's index in its document. None: its index in the sequence.
          rotation: the rotary embedding's angles at these positions, if a caller has them already.
          token_order: each token's index in the sequence, if `activation_sharding` shards it in another order, as
            `kernels.context.shard_sequence` does with its own chunk size.
          bounds: the keys that each query may attend to, beside what the mask and the documents allow, as data
            (`kernels.Bounds`). Beside `q_start` or `q_end` positions may restart within a document, as at each branch
            of a tree: a mask that doesn't look ahead still allows no token that is later in the sequence.

        Returns:
          The attention's contribution to the residual stream, in the compute dtype.
        """
        if self.activation_sharding is not None:
            self.activation_sharding.check_token_order(positions, token_order, has_bounds=bounds is not None)
        if rotation is None:
            length, sharding = inputs.shape[1], self.activation_sharding
            context_length = length if sharding is None else sharding.whole_length(length)
            rotation = self.make_rotation(
                length, token_order if positions is None else positions, context_length=context_length
            )
        query, key, value = self._project(inputs, rotation)
        if positions is not None and means_indices(self.mask, () if bounds is None else bounds.given):
            positions = None
        elif positions is not None and bounds is not None and not self.mask.looks_ahead:
            bounds = self._without_later_tokens(bounds, inputs.shape[0], inputs.shape[1], token_order)
        attended = self._attend(query, key, value, segment_ids, positions, token_order, bounds)
        return checkpoint_name(self._project_back(attended), "projection")

    def prefill(
        self,
        inputs: Float[Array, "B T W"],
        cache: SlabCache,
        rotation: Rotation | None,
        *,
        sequences: Int[Array, " B"] | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        """A call on sequences that begin here, whose keys and values are kept for `decode`.

        Args:
          inputs: as in a call. Padding follows a sequence's tokens: they don't see it if the mask doesn't look ahead.
          cache: whatever these sequences held before is dropped.
          rotation: the rotary embedding's angles at positions 0, 1, …
          sequences: the cache's sequence of each batch element; None: element i is sequence i.
          num_tokens: tokens of each batch element, 0 for a sequence that is to stay as it is; None: all.

        Returns:
          What a call returns, and the cache.
        """
        if self.activation_sharding is not None:
            self.activation_sharding.check_token_order(None, None)  # prompts lie in order
        query, key, value = self._project(inputs, rotation)
        outputs = self._project_back(self._attend(query, key, value))
        return outputs, cache.write(key, value, sequences=sequences, num_tokens=num_tokens, from_start=True)

    def decode(
        self,
        inputs: Float[Array, "B T W"],
        cache: SlabCache,
        rotation: Rotation | None,
        *,
        num_tokens: Int[Array, " B"] | None = None,
        tree: TokenTree | None = None,
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        """Attends from a few new tokens of each of the cache's sequences to all that the mask allows of it.

        Args:
          inputs: 1 to 16 tokens of each sequence.
          cache: the sequences so far; the new tokens are added to it.
          rotation: the rotary embedding's angles at the new tokens' positions.
          num_tokens: tokens of each sequence that count, 0 for one that isn't to grow; None: all.
          tree: the branches that the newest tokens form (`kernels.TokenTree`), the rotation being at their positions;
            None: each sequence is a chain.

        Returns:
          The attention's contribution to the residual stream, and the cache. The output for a token that
          doesn't count has no meaning.
        """
        query, key, value = self._project(inputs, rotation)
        positions = cache.lengths[:, None] + jnp.arange(inputs.shape[1], dtype=jnp.int32)
        cache = cache.write(key, value, num_tokens=num_tokens)
        attended = decode_attention(
            query,
            cache,
            self.mask,
            query_positions=positions,
            tree=tree,
            scale=self.query_scale,
            sinks=None if self.sinks is None else self.sinks[...],
            logits_soft_cap=self.logits_soft_cap,
            implementation=self.decode_implementation,
        )
        return self._project_back(attended), cache

    def make_rotation(
        self, length: int, positions: Int[Array, "B T"] | None, *, context_length: int | None = None
    ) -> Rotation | None:
        """The rotation at these positions, for layers of the same `rotary` to share; None: no rotary embedding.

        Args:
          length: T, of the arrays that the caller has.
          positions: each token's index in its document. None: its index in the sequence.
          context_length: the most tokens that a sequence may have, which longrope asks for.

        Raises:
          ValueError: longrope without a context length.
        """
        if self.rotary is None:
            return None
        if positions is None:
            sharding = self.activation_sharding
            positions = jnp.arange(length, dtype=jnp.int32)[None] if sharding is None else sharding.token_order(length)
        return make_rotation(positions, self.rotary, context_length=context_length, dtype=self.compute_dtype)

    def _project(
        self, inputs: Float[Array, "B T W"], rotation: Rotation | None
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        query, key, value = project(self.activation_sharding, inputs, self.query, self.key, self.value)
        if self.qk_norm != "none" and not self.qk_norm_after_rope:
            query, key = self._normalize(query, key)
        if self.rotary is not None:
            assert rotation is not None, "there is a rotary embedding"
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.qk_norm != "none" and self.qk_norm_after_rope:
            query, key = self._normalize(query, key)
        # The kernel's backward needs them. The backward of turning doesn't need its input.
        query, key, value = (checkpoint_name(projected, "projection") for projected in (query, key, value))
        return query, key, value

    def _normalize(
        self, query: Float[Array, "B T N H"], key: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        # The norms' backward needs its input.
        query, key = (checkpoint_name(projected, "projection") for projected in (query, key))
        if self.qk_norm == "per_head":
            return self.query_norm(query), self.key_norm(key)
        whole_query, whole_key = self.query_norm(lax.collapse(query, 2)), self.key_norm(lax.collapse(key, 2))
        return whole_query.reshape(query.shape), whole_key.reshape(key.shape)

    def _project_back(self, attended: Float[Array, "B T N H"]) -> Float[Array, "B T W"]:
        return project_back(self.activation_sharding, attended, self.output)

    def _without_later_tokens(
        self, bounds: Bounds, batch: int, length: int, token_order: Int[Array, "B T"] | None
    ) -> Bounds:
        """The bounds without keys that come after their queries in the sequence."""
        sharding = self.activation_sharding
        whole_length = length if sharding is None else sharding.whole_length(length)
        if token_order is None:
            token_order = jnp.arange(length, dtype=jnp.int32) if sharding is None else sharding.token_order(length)
        index = jnp.broadcast_to(token_order, (batch, length))
        bounds = checked_bounds(bounds, batch, length, length, whole_length) or Bounds()
        return bounds._replace(q_start=index if bounds.q_start is None else jnp.maximum(index, bounds.q_start))

    @jax.named_scope("dot_product_attention")
    def _attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        token_order: Int[Array, "B T"] | None = None,
        bounds: Bounds | None = None,
    ) -> Float[Array, "B T N H"]:
        sinks = None if self.sinks is None else self.sinks[...]
        if self.activation_sharding is not None:
            return attend_over_mesh(
                query,
                key,
                value,
                self.mask,
                self.activation_sharding.layout,
                segment_ids=segment_ids,
                positions=positions,
                token_order=token_order,
                bounds=bounds,
                scale=self.query_scale,
                sinks=sinks,
                logits_soft_cap=self.logits_soft_cap,
                implementation=self.implementation,
                exchange=self.activation_sharding.exchange,
            )
        if token_order is not None:
            raise ValueError(
                "token_order is for sequences that are sharded over a mesh; give the layer an activation_sharding"
            )
        return dot_product_attention(
            query,
            key,
            value,
            self.mask,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            query_positions=positions,
            key_value_positions=positions,
            bounds=bounds,
            scale=self.query_scale,
            sinks=sinks,
            logits_soft_cap=self.logits_soft_cap,
            implementation=self.implementation,
        )


def means_indices(mask: Mask, bounds: Sequence[BoundName]) -> bool:
    """True if a mask may be evaluated on indices in the sequence, in the place of positions.

    They are known ahead of time, so that the kernel plans its tiles then. Positions count up by one within a document,
    where a mask that depends on kv − q alone gives the same answer. With bounds of keys they may restart within one, as
    at each branch of a tree, and a window counts positions.

    Args:
      bounds: names of those that are given.
    """
    may_restart = not set(OF_KEYS).isdisjoint(bounds)
    return mask.translation_invariant and (not may_restart or mask in (CausalMask(), FullMask()))
