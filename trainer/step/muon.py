"""Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon): momentum whose matrices are orthogonalised.

The matrices of a stack of layers are each orthogonalised by themselves, by optax's Newton–Schulz iteration over the
stack. Every device does its share of the layers: they are spread over the whole mesh for it, and the result goes
back to where the parameters lie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from trainer.step.sharding import partition_spec, path_name

# AdamW's updates have about this root mean square, so that its learning rate and weight decay serve Muon, too: an
# orthogonal matrix's is 1 / √max(rows, columns) (Moonshot, arXiv:2502.16982, section 2.2).
UPDATE_RMS = 0.2
_BLOCK_MATRIX = re.compile(r"(?:^|\.)blocks\.\d+\..*\.(kernel|lora\.[ab])$")


def muon_or_adam(params: Any) -> Any:
    """Which rule updates each parameter: "muon" the matrices of blocks, "adam" all else.

    Returns:
      The tree with a word in each leaf's place.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if _BLOCK_MATRIX.search(path_name(path)) else "adam", params
    )


def orthogonalize(mesh: Mesh | None) -> optax.GradientTransformation:
    """Replaces each layer's matrix by an orthogonal one near it, scaled to AdamW's size of updates.

    Args:
      mesh: that the stacks lie on as `partition_spec` says, and whose devices share the work; None: one device.

    Returns:
      A stateless transformation of stacks of block matrices, [layers, …], by the paths of the parameters.
    """

    def orthogonalize_stack(path: Sequence[Any], stack: Array) -> Array:
        name, shape = path_name(path), stack.shape
        spec = P() if mesh is None else partition_spec(name, shape, mesh)
        if ".experts." in name:  # [layers, experts, …]: each expert has a matrix of its own
            stack, spec = lax.collapse(stack, 0, 2), P(None, *spec[2:])
        # [layers, heads, head_dim, width] maps heads to the width, and its adapter's A to the rank; the others map one
        # dim to what follows.
        maps_heads = name.endswith(("attention.output.kernel", "attention.output.lora.a"))
        num_rows = math.prod(stack.shape[1:-1]) if maps_heads else stack.shape[1]

        def orthogonalize_matrices(stack: Array) -> Array:
            matrices = stack.reshape(stack.shape[0], num_rows, -1)
            scale = UPDATE_RMS * math.sqrt(max(matrices.shape[1:]))
            return (scale * _newton_schulz(matrices)).reshape(stack.shape)

        if mesh is None:
            return orthogonalize_matrices(stack).reshape(shape)
        return _spread_layers(orthogonalize_matrices, stack, spec, mesh).reshape(shape)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(orthogonalize_stack, updates))


def _newton_schulz(matrices: Float[Array, "L rows columns"]) -> Float[Array, "L rows columns"]:
    # With no momentum of its own, optax's Muon is its Newton–Schulz iteration, which it doesn't export. The momentum is
    # kept outside, because the layers are spread in between.
    iteration = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
    )
    return iteration.update(matrices, iteration.init(matrices))[0]


def _spread_layers(function: Callable[[Array], Array], stack: Array, spec: P, mesh: Mesh) -> Array:
    """Applies a function of whole layers to a stack whose layers are split, each device working on some of them.

    Args:
      function: of a stack of any number of layers, each by itself.
      stack: [layers, …].
      spec: how it lies on the mesh. The layer dim isn't split.
      mesh: whose devices share the layers.
    """
    split_dims = [(dim, axes) for dim, axes in enumerate(spec) if axes is not None]
    splitting = [axis for _, axes in split_dims for axis in ((axes,) if isinstance(axes, str) else axes)]
    num_shares = math.prod(mesh.shape[axis] for axis in splitting)
    # Over the other axes the stack is replicated. They share the layers as far as there are enough.
    sharing = []
    for axis in mesh.axis_names:
        if axis not in splitting and mesh.shape[axis] > 1 and num_shares < stack.shape[0]:
            sharing.append(axis)
            num_shares *= mesh.shape[axis]
    padding = -stack.shape[0] % num_shares

    def on_each_device(part: Array) -> Array:
        # GSPMD, asked for this by sharding constraints, gathers the whole stack on every device.
        part = jnp.pad(part, ((0, padding), *((0, 0),) * (part.ndim - 1)))
        for dim, axes in split_dims:
            part = lax.all_to_all(part, axes, split_axis=0, concat_axis=dim, tiled=True)
        if sharing:
            num_layers = part.shape[0] // math.prod(mesh.shape[axis] for axis in sharing)
            part = lax.dynamic_slice_in_dim(part, lax.axis_index(tuple(sharing)) * num_layers, num_layers)
        part = function(part)
        if sharing:
            part = lax.all_gather(part, tuple(sharing), tiled=True)
        for dim, axes in reversed(split_dims):
            part = lax.all_to_all(part, axes, split_axis=dim, concat_axis=0, tiled=True)
        return part[: stack.shape[0]]

    return jax.shard_map(on_each_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(stack)
