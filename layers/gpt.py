"""A decoder-only transformer whose compile time doesn't grow with its depth.

Shapes: B batch, T tokens, W width, V vocabulary, L layers of one stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from kernels import SlabCache, slab_capacity
from layers.activation_sharding import ActivationSharding
from layers.attention import Attention
from layers.config import GPTConfig, NormPlacement
from layers.initializers import small_init
from layers.layer_config import LayerConfig
from layers.mlp import MLP
from layers.moe import MoE, RouterSums
from layers.norm import RMSNorm
from layers.remat import parse_remat
from layers.rotary import Rotary, Rotation

ApplyBlock = Callable[[nnx.GraphDef, nnx.State, Array], tuple[Array, RouterSums | None]]
GatherLayer = Callable[[nnx.State], nnx.State]
Stacks = tuple[tuple[nnx.GraphDef, ...], tuple[nnx.State, ...]]


class Block(nnx.Module):
    """Attention, then an MLP or a mixture of experts, each added to the residual stream.

    Norms stand before them, behind them or both.

    Args:
      config: the network's sizes.
      layer: what this block has of its own, from `config.layer`.
      activation_sharding: how activations lie on a mesh; None: left to XLA.
      rngs: source of the initial values.

    Source: pre-norm as in GPT-2 (Radford et al., 2019), with RMSNorm and without biases as in Llama (arXiv:2302.13971).
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: LayerConfig,
        *,
        activation_sharding: ActivationSharding | None = None,
        rngs: nnx.Rngs,
    ):
        kernel_init = small_init(config.width)
        output_kernel_init = small_init(config.width, num_layers=config.num_layers)

        def norm(placement: NormPlacement) -> RMSNorm | None:
            return _make_norm(config) if config.norm_placement in (placement, "both") else None

        self.activation_sharding = activation_sharding
        self.attention_norm, self.attention_post_norm = norm("pre"), norm("post")
        self.attention = Attention(
            config.width,
            config.num_heads,
            layer.head_dim,
            num_kv_heads=layer.num_kv_heads,
            mask=layer.mask,
            rope_base=layer.rope_base,
            rope_scaling=layer.rope_scaling,
            rope_fraction=layer.rope_fraction,
            attention_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
            qk_norm_after_rope=config.qk_norm_after_rope,
            query_scale=config.query_scale,
            logits_soft_cap=config.logits_soft_cap,
            sinks=config.sinks,
            implementation=config.implementation,
            decode_implementation=config.decode_implementation,
            compute_dtype=config.compute_dtype,
            param_dtype=config.param_dtype,
            norm_epsilon=config.norm_epsilon,
            norm_scale_offset=config.norm_scale_offset,
            kernel_init=kernel_init,
            output_kernel_init=output_kernel_init,
            activation_sharding=activation_sharding,
            rngs=rngs,
        )
        self.mlp_norm, self.mlp_post_norm = norm("pre"), norm("post")
        options: dict[str, Any] = {
            "kind": config.mlp,
            "compute_dtype": config.compute_dtype,
            "param_dtype": config.param_dtype,
            "kernel_init": kernel_init,
            "output_kernel_init": output_kernel_init,
            "activation_sharding": activation_sharding,
            "rngs": rngs,
        }
        self.mlp = (
            MLP(config.width, config.mlp_width, use_bias=config.mlp_bias, **options)
            if config.moe is None
            else MoE(config.width, config.moe, **options)
        )

    def __call__(
        self,
        hidden: Float[Array, "B T W"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        rotation: Rotation | None = None,
        places: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T W"]:
        """Returns the residual stream after this block; see `Attention` for the other arguments."""
        return self.with_router_sums(hidden, segment_ids, positions, rotation, places)[0]

    def with_router_sums(
        self,
        hidden: Float[Array, "B T W"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        rotation: Rotation | None = None,
        places: Int[Array, "B T"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        """A call, and the sums of the block's router, None without one; see `MoE` for `counted`."""
        hidden = checkpoint_name(hidden, "layer_input")
        with jax.named_scope("attention"):
            inputs = _normalize(self.attention_norm, hidden)
            attended = self.attention(inputs, segment_ids, positions, rotation, places)
            hidden = hidden + _normalize(self.attention_post_norm, attended)
        return self._add_mlp(hidden, counted)

    def prefill(
        self, hidden: Float[Array, "B T W"], cache: SlabCache, rotation: Rotation | None, **options: Any
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        """Returns the residual stream after this block and the cache; see `Attention.prefill` for the arguments."""
        inputs = _normalize(self.attention_norm, hidden)
        attended, cache = self.attention.prefill(inputs, cache, rotation, **options)
        return self._add_mlp(hidden + _normalize(self.attention_post_norm, attended))[0], cache

    def decode(
        self, hidden: Float[Array, "B T W"], cache: SlabCache, rotation: Rotation | None, **options: Any
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        """Returns the residual stream after this block and the cache; see `Attention.decode` for the arguments."""
        inputs = _normalize(self.attention_norm, hidden)
        attended, cache = self.attention.decode(inputs, cache, rotation, **options)
        return self._add_mlp(hidden + _normalize(self.attention_post_norm, attended))[0], cache

    def _add_mlp(
        self, hidden: Float[Array, "B T W"], counted: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        with jax.named_scope("mlp"):
            inputs = _normalize(self.mlp_norm, hidden)
            outputs, sums = self.mlp(inputs, counted) if isinstance(self.mlp, MoE) else (self.mlp(inputs), None)
            return hidden + _normalize(self.mlp_post_norm, outputs), sums


def _make_norm(config: GPTConfig) -> RMSNorm:
    return RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        scale_offset=config.norm_scale_offset,
        param_dtype=config.param_dtype,
    )


def _normalize(norm: RMSNorm | None, hidden: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
    return hidden if norm is None else norm(hidden)


class GPT(nnx.Module):
    """A GPT: embedding, blocks, final norm, and a head for whoever wants logits.

    Blocks that share a mask are stacked: `blocks[p]` holds layers p, p + P, p + 2P, … of a mask pattern of length P,
    every parameter with a leading layer dim. One scan runs over the repeats of the pattern; the layers of a last,
    incomplete repeat run after it.

    Matrices are initialised by `small_init`, norm scales to 1, sinks to 0.

    Args:
      config: what it is made of.
      rngs: source of the initial values.
      activation_sharding: how activations lie on a mesh; None: left to XLA, attention on one device.

    Example:
      >>> sizes = dict(vocab_size=256, num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128)
      >>> model = GPT(GPTConfig(**sizes), rngs=nnx.Rngs(0))
      >>> hidden = model(jnp.zeros((2, 128), jnp.int32))
      >>> model.logits(hidden).shape
      (2, 128, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, activation_sharding: ActivationSharding | None = None):
        self.config = config
        self.activation_sharding = activation_sharding
        compute_dtype, param_dtype = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
        init = small_init(config.width)
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.width,
            embedding_init=init,
            dtype=compute_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

        def stack(layer: LayerConfig, num_blocks: int) -> Block:
            def make_block(key: Array) -> Block:
                return Block(config, layer, activation_sharding=activation_sharding, rngs=nnx.Rngs(key))

            return nnx.vmap(make_block)(jax.random.split(rngs.params(), num_blocks))

        pattern_length = config.pattern_length
        num_blocks = [len(range(p, config.num_layers, pattern_length)) for p in range(pattern_length)]
        self.blocks = nnx.List([stack(config.layer(p), num) for p, num in enumerate(num_blocks)])
        self.final_norm = _make_norm(config)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.width,
                config.vocab_size,
                use_bias=False,
                kernel_init=init,
                dtype=compute_dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        places: Int[Array, "B T"] | None = None,
        *,
        gather_layer: GatherLayer | None = None,
    ) -> Float[Array, "B T W"]:
        """Runs the network up to and with its final norm.

        Args:
          tokens: token ids, less than vocab_size.
          segment_ids: document of each token; attention stays within one. None: one document per batch element.
          positions: each token's place in its document. None: its place in the sequence.
          places: each token's place in the sequence, if `activation_sharding` deals tokens out in another order.
          gather_layer: makes the parameters that a layer computes with, in the compute dtype, of those that are stored,
            where they are used: in the loop over layers, and again where the backward pass recomputes. None: the
            stored ones, cast.

        Returns:
          Hidden states in the compute dtype; `logits` or a chunked loss over `head_kernel` goes on from here.
        """
        return self.with_router_sums(tokens, segment_ids, positions, places, gather_layer=gather_layer)[0]

    def with_router_sums(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        places: Int[Array, "B T"] | None = None,
        *,
        counted: Bool[Array, "B T"] | None = None,
        gather_layer: GatherLayer | None = None,
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        """A call that also returns what the routers' losses are made of.

        Args:
          tokens, segment_ids, positions, places, gather_layer: as of a call.
          counted: tokens that the sums are of, without padding; None: all.

        Returns:
          Hidden states as of a call, and the sums of all layers, in stacks; None without a mixture of experts.
        """
        length, sharding = tokens.shape[1], self.activation_sharding
        rotations = self._make_rotations(
            length,
            places if positions is None else positions,
            length if sharding is None else sharding.whole_length(length),
        )

        def apply_block(graphdef: nnx.GraphDef, state: nnx.State, hidden: Array) -> tuple[Array, RouterSums | None]:
            if gather_layer is not None:
                state = gather_layer(state)
            block = nnx.merge(graphdef, state)
            rotation = rotations[block.attention.rotary]
            return block.with_router_sums(hidden, segment_ids, positions, rotation, places, counted)

        stacks = self._split_stacks(cast=gather_layer is None)
        hidden, sums = self._apply_blocks(apply_block, stacks, self._embed(tokens))
        return self.final_norm(hidden), sums

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        caches: tuple[SlabCache, ...],
        *,
        sequences: Int[Array, " B"] | None = None,
        num_tokens: Int[Array, " B"] | None = None,
        context_length: int | None = None,
    ) -> tuple[Float[Array, "B T W"], tuple[SlabCache, ...]]:
        """Runs the network on prompts as in training, and keeps their keys and values for `decode`.

        Args:
          tokens: token ids; what follows a prompt's own is padding, which no other token sees.
          caches: from `init_caches`; whatever these sequences held before is dropped.
          sequences: the caches' sequence of each prompt; None: prompt i is sequence i.
          num_tokens: tokens of each prompt, 0 for a sequence that is to stay as it is; None: all.
          context_length: the length that `init_caches` was told. Only longrope asks for it.

        Returns:
          Hidden states as from a call, and the caches.

        Raises:
          ValueError: a mask looks ahead, so that what later tokens would change is computed already; or longrope
            without a context length.

        Example:
          >>> sizes = dict(vocab_size=256, num_layers=1, width=64, num_heads=4, num_kv_heads=2, head_dim=16)
          >>> model = GPT(GPTConfig(**sizes, mlp_width=128), rngs=nnx.Rngs(0))
          >>> prompts, token = jnp.zeros((2, 100), jnp.int32), jnp.zeros((2, 1), jnp.int32)
          >>> _, caches = jax.eval_shape(model.prefill, prompts, init_caches(model.config, 2, length=128))
          >>> hidden, caches = jax.eval_shape(model.decode, token, caches)
          >>> hidden.shape
          (2, 1, 64)
        """
        self.config.check_looks_back_only()
        rotations = self._make_rotations(tokens.shape[1], None, context_length)

        def apply_block(graphdef: nnx.GraphDef, state: nnx.State, hidden: Array, cache: SlabCache):
            block = nnx.merge(graphdef, state)
            rotation = rotations[block.attention.rotary]
            return block.prefill(hidden, cache, rotation, sequences=sequences, num_tokens=num_tokens)

        return self._apply_with_caches(apply_block, tokens, caches)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        caches: tuple[SlabCache, ...],
        *,
        num_tokens: Int[Array, " B"] | None = None,
        context_length: int | None = None,
    ) -> tuple[Float[Array, "B T W"], tuple[SlabCache, ...]]:
        """Runs the network on the next few tokens of every sequence.

        Args:
          tokens: 1 to 16 new tokens of each of the caches' sequences, no more than `init_caches` was told of.
          caches: what `prefill` or `decode` returned last.
          num_tokens: tokens of each sequence that count, from the first: 0 leaves it as it is; None: all.
          context_length: the length that `init_caches` was told. Only longrope asks for it.

        Returns:
          Hidden states of the new tokens, those of a call on the whole sequence, and the caches.

        Raises:
          ValueError: longrope without a context length.
        """
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        rotations = self._make_rotations(tokens.shape[1], caches[0].lengths[:, None] + places, context_length)

        def apply_block(graphdef: nnx.GraphDef, state: nnx.State, hidden: Array, cache: SlabCache):
            block = nnx.merge(graphdef, state)
            return block.decode(hidden, cache, rotations[block.attention.rotary], num_tokens=num_tokens)

        return self._apply_with_caches(apply_block, tokens, caches)

    def _make_rotations(
        self, length: int, positions: Int[Array, "B T"] | None, context_length: int | None
    ) -> dict[Rotary | None, Rotation | None]:
        """One rotation for all layers of the same rotary settings."""
        one_of_each = {block.attention.rotary: block.attention for block in self.blocks}
        return {
            rotary: attention.make_rotation(length, positions, context_length=context_length)
            for rotary, attention in one_of_each.items()
        }

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        table = self.embedding.embedding[...]
        if self.activation_sharding is not None:
            table = self.activation_sharding.constrain_embedding(table)
        # Cast after the lookup: its gradient sums over all uses of a token, and in bfloat16 a sum of equal terms stops
        # growing at 256 of them.
        with jax.named_scope("embedding"):
            hidden = jnp.take(table, tokens, axis=0)
            if (scale := self.config.embedding_scale) is not None:
                hidden = hidden.astype(jnp.promote_types(self.config.compute_dtype, jnp.float32)) * scale
            hidden = hidden.astype(self.config.compute_dtype)
        if self.activation_sharding is not None:
            hidden = self.activation_sharding.constrain_hidden(hidden)
        return hidden

    def _apply_with_caches(
        self,
        apply_block: Callable[[nnx.GraphDef, nnx.State, Array, SlabCache], tuple[Array, SlabCache]],
        tokens: Int[Array, "B T"],
        caches: tuple[SlabCache, ...],
    ) -> tuple[Float[Array, "B T W"], tuple[SlabCache, ...]]:
        # Layer by layer: a loop would copy every layer's cache out of a stack and back, for a few tokens each time.
        apply = jax.jit(apply_block, static_argnums=(0,))
        hidden, grown = self._embed(tokens), []
        for (graphdef, state), cache in zip(self._split_layers(self._split_stacks()), caches, strict=True):
            hidden, cache = apply(graphdef, state, hidden, cache)
            grown.append(cache)
        return self.final_norm(hidden), tuple(grown)

    def _apply_blocks(
        self, apply_block: ApplyBlock, stacks: Stacks, hidden: Float[Array, "B T W"]
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        if not self.config.scan_layers:
            return self._apply_each(apply_block, stacks, hidden)
        graphdefs, states = stacks
        num_repeats, num_left_over = divmod(self.config.num_layers, len(graphdefs))
        # A loop keeps XLA from merging the recomputation with the forward pass, as a barrier would, but a barrier also
        # stands in the way of fusion. XLA unrolls a loop of one repeat, so that needs the barrier like no loop at all.
        apply_in_scan = self._rematerialized(apply_block, prevent_cse=num_repeats == 1)
        apply_after_scan = self._rematerialized(apply_block, prevent_cse=True)

        def apply_pattern(hidden: Array, layer_states: tuple[nnx.State, ...]) -> tuple[Array, list[RouterSums | None]]:
            sums = []
            for graphdef, state in zip(graphdefs, layer_states, strict=True):
                hidden, of_layer = apply_in_scan(graphdef, state, hidden)
                sums.append(of_layer)
            return hidden, sums

        hidden, sums = jax.lax.scan(apply_pattern, hidden, jax.tree.map(lambda leaf: leaf[:num_repeats], states))
        of_layers = jax.tree.map(lambda *of_pattern: jax.lax.collapse(jnp.stack(of_pattern, axis=1), 0, 2), *sums)
        for graphdef, state in zip(graphdefs[:num_left_over], states[:num_left_over], strict=True):
            hidden, last = apply_after_scan(graphdef, jax.tree.map(lambda leaf: leaf[num_repeats], state), hidden)
            of_layers = jax.tree.map(lambda stack, of_last: jnp.concatenate([stack, of_last[None]]), of_layers, last)
        return hidden, of_layers

    def _apply_each(
        self, apply_block: ApplyBlock, stacks: Stacks, hidden: Float[Array, "B T W"]
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        # Traced and lowered once for all layers of a mask, their kernels too; XLA inlines the calls.
        apply = jax.jit(self._rematerialized(apply_block, prevent_cse=True), static_argnums=(0,))
        of_layers = []
        for graphdef, state in self._split_layers(stacks):
            hidden, of_layer = apply(graphdef, state, hidden)
            of_layers.append(of_layer)
        return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers)

    def _rematerialized(self, apply_block: ApplyBlock, *, prevent_cse: bool) -> ApplyBlock:
        policy = parse_remat(self.config.remat)
        if policy is None:
            return apply_block
        if self.activation_sharding is not None and self.activation_sharding.exchanges_keys:
            policy = policy.keeping_attention()
        return policy.apply(apply_block, prevent_cse=prevent_cse)

    def _split_layers(self, stacks: Stacks) -> Iterator[tuple[nnx.GraphDef, nnx.State]]:
        """The blocks in the order of the layers, unstacked."""
        graphdefs, states = stacks
        unstacked = [_unstack(state) for state in states]
        for layer in range(self.config.num_layers):
            repeat, pattern_index = divmod(layer, len(graphdefs))
            yield graphdefs[pattern_index], unstacked[pattern_index][repeat]

    def _split_stacks(self, *, cast: bool = True) -> Stacks:
        graphdefs, states = zip(*(nnx.split(stack) for stack in self.blocks), strict=True)
        # Once for all layers and both passes; each layer would cast its own, forward and again backward.
        return graphdefs, _with_matrices_in(jnp.dtype(self.config.compute_dtype), states) if cast else states

    @property
    def head_kernel(self) -> Float[Array, "W V"]:
        """The matrix from hidden states to logits, in the parameter dtype."""
        return self.embedding.embedding[...].T if self.config.tie_embeddings else self.head.kernel[...]

    def logits(self, hidden: Float[Array, "*batch W"]) -> Float[Array, "*batch V"]:
        """Returns logits in float32 or wider, as their sums, soft cap included; operands in the compute dtype."""
        kernel = self.head_kernel.astype(self.config.compute_dtype)
        dtype = jnp.promote_types(kernel.dtype, jnp.float32)
        logits = jnp.einsum("...w,wv->...v", hidden, kernel, preferred_element_type=dtype)
        cap = self.config.final_logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def init_caches(
    config: GPTConfig, num_sequences: int, length: int, *, tokens_per_step: int = 1
) -> tuple[SlabCache, ...]:
    """Empty caches for `GPT.prefill` and `GPT.decode`, one for each layer.

    Args:
      config: of the GPT.
      num_sequences: sequences to decode side by side.
      length: tokens that each of them may grow to. A layer whose mask looks only so far back keeps that many.
      tokens_per_step: tokens of a sequence that `decode` is given at a time.
    """
    return tuple(
        SlabCache.empty(
            num_sequences,
            slab_capacity(layer.mask, length, tokens_per_step),
            layer.num_kv_heads,
            layer.head_dim,
            dtype=config.compute_dtype,
        )
        for layer in map(config.layer, range(config.num_layers))
    )


def unrolled_config(config: GPTConfig) -> GPTConfig:
    """Config of the same GPT with every layer by itself; see `unroll_params`."""

    def each_layers(pattern: tuple) -> tuple:
        return tuple(pattern[layer % len(pattern)] for layer in range(config.num_layers)) if pattern else ()

    masks, overrides = each_layers(config.masks), each_layers(config.layer_overrides)
    return dataclasses.replace(config, masks=masks, layer_overrides=overrides, scan_layers=False)


def unroll_params(config: GPTConfig, params: Any) -> Any:
    """Lays a model out for `GPT.prefill` and `GPT.decode`: each layer by itself, matrices in the compute dtype.

    The model computes the same. But a step of decoding reads every matrix for the sake of a few tokens, and would spend
    its time on taking them out of their stacks and casting them.

    Args:
      config: of a GPT.
      params: its parameters, a nested dict by the names of its attributes, as `nnx.to_pure_dict` makes it.

    Returns:
      The parameters of the GPT of `unrolled_config(config)`.
    """
    pattern_length = config.pattern_length
    blocks = {}
    for layer in range(config.num_layers):
        repeat, pattern_index = divmod(layer, pattern_length)
        blocks[layer] = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat][None], params["blocks"][pattern_index])
    return _with_matrices_in(jnp.dtype(config.compute_dtype), params | {"blocks": blocks})


def _with_matrices_in(dtype: jnp.dtype, params: Any) -> Any:
    """Matrices in the compute dtype; norm scales, sinks and routers, which compute in float32, as they are."""

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        keys = {getattr(key, "key", None) for key in path}
        return leaf.astype(dtype) if keys & {"kernel", "embedding"} and "router" not in keys else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def _unstack(state: nnx.State) -> list[nnx.State]:
    """One state a layer. A split's gradient is one concatenation; that of L slices is a sum of L padded arrays."""
    leaves, treedef = jax.tree.flatten(state)
    num_layers = leaves[0].shape[0]
    pieces = [[piece[0] for piece in jax.lax.split(leaf, (1,) * num_layers)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*pieces, strict=True)]
