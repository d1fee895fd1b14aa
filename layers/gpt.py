"""A decoder-only transformer whose compile time doesn't grow with its depth.

Shapes: B batch, T tokens, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels import Bounds, SlabCache, TokenTree
from kernels.arguments.bounds import checked_bounds
from kernels.decode.tree import checked_tree
from kernels.tracing.number_types import at_least_float32
from layers.activation_sharding import ActivationSharding
from layers.block import Block, make_norm
from layers.config import GPTConfig
from layers.generator import generator_of, make_requests
from layers.layer_config import LayerConfig
from layers.layer_stacks import LayerStacks, apply_layers, with_matrices_in
from layers.moe import RouterSums
from layers.projections import small_init
from layers.remat import Remat, parse_remat
from layers.rotary import Rotary, Rotation
from layers.token_choice import TokenChoice

GatherLayer = Callable[[nnx.State], nnx.State]


class GPT(nnx.Module):
    """A GPT: embedding, blocks, final norm, and a head for whoever wants logits.

    Blocks that share a mask are stacked: `blocks[p]` holds layers p, p + P, p + 2P, … of a mask pattern of length P,
    every parameter with a leading layer dim. One scan runs over the repeats of the pattern; the layers of a last,
    incomplete repeat run after it.

    Matrices are initialised by `small_init`, norm scales to 1, sinks to 0.

    Args:
      config: of the model.
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
        self.final_norm = make_norm(config)
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
        token_order: Int[Array, "B T"] | None = None,
        *,
        bounds: Bounds | Sequence[Bounds | None] | None = None,
        gather_layer: GatherLayer | None = None,
    ) -> Float[Array, "B T W"]:
        """Runs the network up to and with its final norm.

        Args:
          tokens: token ids, less than vocab_size.
          segment_ids: document of each token; attention stays within one. None: one document per batch element.
          positions: each token's index in its document. None: its index in the sequence.
          token_order: each token's index in the sequence, if `activation_sharding` shards it in another order.
          bounds: the keys that each query may attend to, as data (`Attention`): one for all layers, or one, or None,
            for each entry of the pattern of `config.masks`.
          gather_layer: makes the parameters that a layer computes with, in the compute dtype, of those that are stored,
            where they are used: in the loop over layers, and again where the backward pass recomputes. None: the
            stored ones, cast.

        Returns:
          Hidden states in the compute dtype; `logits` or a chunked loss over `head_kernel` goes on from here.
        """
        return self.with_router_sums(
            tokens, segment_ids, positions, token_order, bounds=bounds, gather_layer=gather_layer
        )[0]

    def with_router_sums(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        token_order: Int[Array, "B T"] | None = None,
        *,
        bounds: Bounds | Sequence[Bounds | None] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        gather_layer: GatherLayer | None = None,
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        """A call that also returns the sums for the routers' losses.

        Args:
          tokens, segment_ids, positions, token_order, bounds, gather_layer: as for a call.
          counted: tokens that the sums are of, without padding; None: all.

        Returns:
          Hidden states as of a call, and the sums of all layers, in stacks; None without a mixture of experts.
        """
        length, sharding = tokens.shape[1], self.activation_sharding
        rotations = self._make_rotations(
            length,
            token_order if positions is None else positions,
            length if sharding is None else sharding.whole_length(length),
        )

        def apply_block(
            graphdef: nnx.GraphDef, state: nnx.State, hidden: Array, bounds: Bounds | None
        ) -> tuple[Array, RouterSums | None]:
            if gather_layer is not None:
                state = gather_layer(state)
            block = nnx.merge(graphdef, state)
            rotation = rotations[block.attention.rotary]
            return block(hidden, segment_ids, positions, rotation, token_order, counted, bounds)

        stacks = self._split_stacks(cast=gather_layer is None)
        hidden, sums = apply_layers(
            apply_block,
            stacks,
            self._embed(tokens),
            bounds=self._bounds_of_stacks(bounds, *tokens.shape),
            scan=self.config.scan_layers,
            remat=self._remat(),
        )
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
          context_length: the length that was given to `init_caches`. Only longrope asks for it.

        Returns:
          Hidden states as from a call, and the caches.

        Raises:
          ValueError: a mask looks ahead, so that what later tokens would change is computed already; or longrope
            without a context length.

        Example:
          >>> from layers import init_caches
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
        tree: TokenTree | None = None,
        context_length: int | None = None,
    ) -> tuple[Float[Array, "B T W"], tuple[SlabCache, ...]]:
        """Runs the network on the next few tokens of every sequence.

        Args:
          tokens: 1 to 16 new tokens of each of the caches' sequences, no more than the `tokens_per_step` of
            `init_caches`.
          caches: those that `prefill` or `decode` returned last.
          num_tokens: tokens of each sequence that count, from the first: 0 leaves it as it is; None: all.
          tree: the branches that the newest tokens form, these among them: a draft to verify, or completions of one
            prompt. All of its tokens count for `tokens_per_step`. `SlabCache.keep_path` on each cache keeps one branch.
            None: each sequence is a chain.
          context_length: the length that was given to `init_caches`. Only longrope asks for it.

        Returns:
          Hidden states of the new tokens, those of a call on the whole sequence (with a tree: on a token's branch by
          itself), and the caches.

        Raises:
          ValueError: a tree of other sequences or of fewer tokens, or longrope without a context length.
        """
        offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = caches[0].lengths[:, None] + offsets
        if tree is not None:
            positions = checked_tree(tree, *tokens.shape).positions(positions)
        rotations = self._make_rotations(tokens.shape[1], positions, context_length)

        def apply_block(graphdef: nnx.GraphDef, state: nnx.State, hidden: Array, cache: SlabCache):
            block = nnx.merge(graphdef, state)
            return block.decode(hidden, cache, rotations[block.attention.rotary], num_tokens=num_tokens, tree=tree)

        return self._apply_with_caches(apply_block, tokens, caches)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop_token: int | None = None,
        vocab_size: int | None = None,
    ) -> list[list[int]]:
        """Continues prompts, several side by side, on one device; for a script or a notebook.

        The first call compiles. Later ones of as many prompts and about as many tokens use the same programs, also
        with another temperature or after an update of the parameters.

        Args:
          prompts: token ids of each, at least one; of any lengths.
          num_tokens: to add to each prompt.
          temperature: logits are divided by it; 0 always takes the likeliest token.
          top_k: choose among this many of the likeliest tokens only; None: among all.
          top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; None: among all.
          seed: of the first prompt's random choices. The next prompts' seeds count up from it.
          stop_token: ends a text, as its last token; None: none does.
          vocab_size: ids from here on aren't chosen, where the tokenizer has fewer than the model; None: all are.

        Returns:
          The tokens that were added to each prompt. Prompt and seed alone determine them, not the other prompts.

        Raises:
          ValueError: a mask looks ahead, there is nothing to continue or no token to add, an id or a number is out of
            its range, or the model lies on a mesh.

        Example:
          >>> sizes = dict(vocab_size=64, num_layers=1, width=32, num_heads=2, num_kv_heads=1, head_dim=16)
          >>> model = GPT(GPTConfig(**sizes, mlp_width=64), rngs=nnx.Rngs(0))
          >>> [len(text) for text in model.generate([[1, 2, 3], [4]], 5, temperature=0.8, top_k=10)]
          [5, 5]
        """
        if self.activation_sharding is not None:
            raise ValueError(
                "generate runs on one device, and the model was made with an activation_sharding; make one without, "
                "and give it the parameters: nnx.update(other, nnx.state(model, nnx.Param))"
            )
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, prompts))):
            raise ValueError("generate compiles its own programs and runs them; call it outside of jax.jit")
        requests = make_requests(
            prompts, num_tokens, seed=seed, stop_token=stop_token, vocab_size=self.config.vocab_size
        )
        generator = generator_of(GPT, self.config, self.config.vocab_size if vocab_size is None else vocab_size)
        texts: list[list[int]] = [[] for _ in requests]
        choice = TokenChoice(temperature, top_k, top_p)
        for new in generator.generate(generator.lay_out(params), requests, choice):
            texts[new.request].append(new.token)
        return texts

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
                hidden = hidden.astype(at_least_float32(self.config.compute_dtype)) * scale
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
        for (graphdef, state), cache in zip(self._split_stacks().each_layer(), caches, strict=True):
            hidden, cache = apply(graphdef, state, hidden, cache)
            grown.append(cache)
        return self.final_norm(hidden), tuple(grown)

    def _split_stacks(self, *, cast: bool = True) -> LayerStacks:
        graphdefs, states = zip(*(nnx.split(stack) for stack in self.blocks), strict=True)
        # Once for all layers and both passes; each layer would cast its own, forward and again backward.
        states = with_matrices_in(jnp.dtype(self.config.compute_dtype), states) if cast else states
        return LayerStacks(graphdefs, states, self.config.num_layers)

    def _bounds_of_stacks(
        self, bounds: Bounds | Sequence[Bounds | None] | None, batch: int, length: int
    ) -> list[Bounds | None]:
        num_stacks, sharding = len(self.blocks), self.activation_sharding
        whole_length = length if sharding is None else sharding.whole_length(length)
        if bounds is None or isinstance(bounds, Bounds):
            return [checked_bounds(bounds, batch, length, length, whole_length)] * num_stacks
        if len(bounds) != num_stacks:
            raise ValueError(
                f"bounds has {len(bounds)} entries for layers that repeat after {num_stacks}; give one for each of "
                "these, or kernels.Bounds for all"
            )
        return [checked_bounds(each, batch, length, length, whole_length) for each in bounds]

    def _remat(self) -> Remat | None:
        policy = parse_remat(self.config.remat)
        exchanges_keys = self.activation_sharding is not None and self.activation_sharding.exchanges_keys
        return policy.keeping_attention() if policy is not None and exchanges_keys else policy

    @property
    def head_kernel(self) -> Float[Array, "W V"]:
        """The matrix from hidden states to logits, in the parameter dtype."""
        return self.embedding.embedding[...].T if self.config.tie_embeddings else self.head.kernel[...]

    def logits(self, hidden: Float[Array, "*batch W"]) -> Float[Array, "*batch V"]:
        """Returns logits in float32 or wider, as their sums, soft cap included; operands in the compute dtype."""
        kernel = self.head_kernel.astype(self.config.compute_dtype)
        dtype = at_least_float32(kernel.dtype)
        logits = jnp.einsum("...w,wv->...v", hidden, kernel, preferred_element_type=dtype)
        cap = self.config.final_logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
