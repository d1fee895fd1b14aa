"""The layers of a GPT in stacks, and the way through them: one scan over the repeats of a pattern, or layer by layer.

Of a mask pattern of length P, stack p holds layers p, p + P, p + 2P, …, every parameter with a leading layer dim.

Shapes: B batch, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kernels import Bounds
from layers.moe import RouterSums
from layers.remat import Remat

Stack = TypeVar("Stack")
ApplyBlock = Callable[[nnx.GraphDef, nnx.State, Array, Bounds | None], tuple[Array, RouterSums | None]]


@dataclass(frozen=True)
class LayerStacks:
    """The blocks of a GPT, split into their structure and their parameters.

    Args:
      graphdefs: structure of a block of each stack.
      states: parameters of each stack, with a leading layer dim.
      num_layers: layers of all stacks.
    """

    graphdefs: tuple[nnx.GraphDef, ...]
    states: tuple[nnx.State, ...]
    num_layers: int

    def each_layer(self) -> Iterator[tuple[nnx.GraphDef, nnx.State]]:
        """The blocks in the order of the layers, unstacked."""
        unstacked = [_unstack(state) for state in self.states]
        for layer in range(self.num_layers):
            repeat, pattern_index = divmod(layer, len(self.graphdefs))
            yield self.graphdefs[pattern_index], unstacked[pattern_index][repeat]


def restack(stacks: Mapping[int, Stack], num_layers: int, num_stacks: int) -> dict[int, Stack]:
    """Rearranges layers into another number of stacks.

    Args:
      stacks: parameters of each stack, with a leading layer dim.
      num_layers: layers of all stacks.
      num_stacks: the length of the other pattern.

    Example:
      >>> restack({0: jnp.array([0, 1, 2, 3, 4])}, 5, 2)
      {0: Array([0, 2, 4], dtype=int32), 1: Array([1, 3], dtype=int32)}
    """
    layers = [_unstack(stacks[index]) for index in range(len(stacks))]
    in_order = [layers[layer % len(stacks)][layer // len(stacks)] for layer in range(num_layers)]
    return {
        index: jax.tree.map(lambda *leaves: jnp.stack(leaves), *in_order[index::num_stacks])
        for index in range(num_stacks)
    }


def apply_layers(
    apply_block: ApplyBlock,
    stacks: LayerStacks,
    hidden: Float[Array, "B T W"],
    *,
    bounds: Sequence[Bounds | None],
    scan: bool,
    remat: Remat | None,
) -> tuple[Float[Array, "B T W"], RouterSums | None]:
    """Runs all layers.

    Args:
      apply_block: runs one.
      stacks: the layers.
      hidden: the residual stream that enters the first.
      bounds: of each stack's layers.
      scan: one loop over the repeats of the pattern; False: layer by layer.
      remat: policy of the activations that the backward pass recomputes; None: none.

    Returns:
      The residual stream behind the last layer, and the routers' sums of all layers, stacked; None without routers.
    """
    if not scan:
        return _apply_each(apply_block, stacks, hidden, bounds, remat)
    graphdefs, states = stacks.graphdefs, stacks.states
    num_repeats, num_left_over = divmod(stacks.num_layers, len(graphdefs))
    # A loop keeps XLA from merging the recomputation with the forward pass, as a barrier would, but a barrier also
    # stands in the way of fusion. XLA unrolls a loop of one repeat, so that needs the barrier like no loop at all.
    apply_in_scan = _rematerialized(apply_block, remat, prevent_cse=num_repeats == 1)
    apply_after_scan = _rematerialized(apply_block, remat, prevent_cse=True)

    def apply_pattern(hidden: Array, layer_states: tuple[nnx.State, ...]) -> tuple[Array, list[RouterSums | None]]:
        sums = []
        for graphdef, state, own_bounds in zip(graphdefs, layer_states, bounds, strict=True):
            hidden, layer_sums = apply_in_scan(graphdef, state, hidden, own_bounds)
            sums.append(layer_sums)
        return hidden, sums

    hidden, sums = jax.lax.scan(apply_pattern, hidden, jax.tree.map(lambda leaf: leaf[:num_repeats], states))
    router_sums = jax.tree.map(lambda *pattern_sums: jax.lax.collapse(jnp.stack(pattern_sums, axis=1), 0, 2), *sums)
    for graphdef, state, own_bounds in list(zip(graphdefs, states, bounds, strict=True))[:num_left_over]:
        last_state = jax.tree.map(lambda leaf: leaf[num_repeats], state)
        hidden, last = apply_after_scan(graphdef, last_state, hidden, own_bounds)
        router_sums = jax.tree.map(
            lambda stack, last_sums: jnp.concatenate([stack, last_sums[None]]), router_sums, last
        )
    return hidden, router_sums


def _apply_each(
    apply_block: ApplyBlock,
    stacks: LayerStacks,
    hidden: Float[Array, "B T W"],
    bounds: Sequence[Bounds | None],
    remat: Remat | None,
) -> tuple[Float[Array, "B T W"], RouterSums | None]:
    # Traced and lowered once for all layers of a mask, their kernels too; XLA inlines the calls.
    apply = jax.jit(_rematerialized(apply_block, remat, prevent_cse=True), static_argnums=(0,))
    router_sums = []
    for (graphdef, state), own_bounds in zip(stacks.each_layer(), cycle(bounds), strict=False):
        hidden, layer_sums = apply(graphdef, state, hidden, own_bounds)
        router_sums.append(layer_sums)
    return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *router_sums)


def _rematerialized(apply_block: ApplyBlock, remat: Remat | None, *, prevent_cse: bool) -> ApplyBlock:
    return apply_block if remat is None else remat.apply(apply_block, prevent_cse=prevent_cse)


def with_matrices_in(dtype: jnp.dtype, params: Any) -> Any:
    """Matrices in the compute dtype; norm scales, sinks and routers, which compute in float32, as they are."""

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        keys = {getattr(key, "key", None) for key in path}
        return leaf.astype(dtype) if keys & {"kernel", "embedding"} and "router" not in keys else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def _unstack(state: Stack) -> list[Stack]:
    """One state a layer. A split's gradient is one concatenation; that of L slices is a sum of L padded arrays."""
    leaves, treedef = jax.tree.flatten(state)
    num_layers = leaves[0].shape[0]
    slices = [[part[0] for part in jax.lax.split(leaf, (1,) * num_layers)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*slices, strict=True)]
