"""How devices get at whole parameters, and how their gradients become one sum.

Each device keeps its own shard of every matrix. It gathers the whole matrix in the compute dtype, and its own tokens
give it a gradient of its own. Only the sum over all devices means anything. It is made in float32: first over the axes
that split the matrix, where each device keeps its shard of the sum (a reduce-scatter), then over the other axes. XLA's
partitioner, left to itself, sums in the dtype of the matmul that made the gradient, and as soon as it is made. So the
forward and backward passes run in `jax.shard_map`, where JAX sums nothing by itself.

When a gradient is summed:

- One micro-batch to an update: a layer's matrices are gathered where the layer is computed, so that one layer is whole
  at a time, and their gradients are summed in the backward pass, under the computation of other layers (ZeRO-3,
  arXiv:1910.02054; FSDP, arXiv:2304.11277).
- Several: that would send everything once for each. Instead all matrices are gathered before the first micro-batch,
  and each device adds up its own gradients, which are summed over devices after the last one (as PyTorch's FSDP does
  after `set_requires_gradient_sync(False)`). A device then holds the whole model in the compute dtype and its gradient
  in float32, of which `tensor` alone takes its share.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kernels.tracing.number_types import at_least_float32
from trainer.step.sharding import AXES, STATE_AXES, TOKEN_AXES, axes_of, path_name


class ParameterGather:
    """Gathers a model's parameters on the devices of a mesh, and sums their gradients.

    All methods but `map_devices` are for the functions that it maps.

    Args:
      params: shapes, dtypes and shardings; the layers' parameters are in stacks.
      mesh: from `make_mesh`.
      compute_dtype: what matrices are gathered in. The layers use them in it; the embedding and the head come back in
        their own dtype, in which their gradients are summed over tokens.
    """

    def __init__(self, params: Any, mesh: Mesh, *, compute_dtype: str):
        self._params, self._mesh = params, mesh
        self._token_axes = _that_split(TOKEN_AXES, mesh)
        dtype = jnp.dtype(compute_dtype)
        self._routes = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _Route.of(path_name(path), leaf, mesh, dtype), params
        )

    def map_devices(self, function: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """`jax.shard_map` over the axes along which devices hold different tokens, if there are any.

        Where all devices hold the same tokens, nothing is mapped: the function takes whole arrays.

        Args:
          function: of arrays that are one device's part along these axes.
          in_specs, out_specs: as for `jax.shard_map`. They may name `tensor`, too, along which arrays stay whole to
            the function, and are split by XLA's partitioner.
        """
        if self._mesh.size == 1:
            return function
        if not self._token_axes:
            return self._in_mesh(function)
        axes = _mapped_axes(self._mesh)
        in_specs, out_specs = jax.tree.map(lambda spec: _only(spec, axes), (in_specs, out_specs))
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            # JAX would sum a gradient as soon as it can, and the kernels don't say over which axes they vary.
            check_vma=False,
        )

    def _in_mesh(self, function: Callable) -> Callable:
        """Makes the mesh JAX's current one for a function, as `jax.shard_map` would, and maps none of its axes.

        The layers and the loss map `tensor` by a `jax.shard_map` of their own. Nested in another, even one that maps
        only axes of size 1, it would be lowered for an abstract mesh, without device ids. But a Mosaic kernel that
        writes to another device's memory has to know that device's id (JAX 0.11.2).
        """

        def in_mesh(*arguments):
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                return function(*arguments)

        return in_mesh

    @property
    def abstract_whole(self) -> Any:
        """Shapes and shardings of whole parameters, in the dtype that they are stored in."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(self._mesh, _only(leaf.sharding.spec, frozenset(AXES) - set(TOKEN_AXES))),
            ),
            self._params,
        )

    @property
    def gather_layer(self) -> Callable[[Any], Any] | None:
        """Gathers the matrices of a layer, given as `nnx.State`; differentiated, it sums their gradients.

        None: nothing is sent, so the model may as well cast those of all layers at once.
        """
        if not self._token_axes:
            return None
        routes = {
            _name_in_layer(path_name(path)): route.of_one_layer()
            for path, route in jax.tree_util.tree_flatten_with_path(self._routes)[0]
            if route.is_of_layer_matrix
        }

        def gather(path: Sequence[Any], leaf: Array) -> Array:
            route = routes.get(path_name(path).removesuffix(".value"))
            return leaf if route is None else _gather(route, leaf)

        return lambda state: jax.tree_util.tree_map_with_path(gather, state)

    def gather_others(self, params: Any) -> Any:
        """Gathers what `gather_layer` leaves; differentiated, it sums their gradients."""
        return jax.tree.map(
            lambda route, leaf: leaf if route.is_of_layer_matrix else _gather(route, leaf), self._routes, params
        )

    def gather(self, params: Any) -> Any:
        """Gathers all parameters. Their gradients are for `reduce`."""
        return jax.tree.map(lambda route, leaf: route.gather(leaf), self._routes, params)

    def reduce(self, gradients: Any) -> Any:
        """Sums all devices' gradients of what `gather` returned, or of a part; each device keeps its shards."""
        routes = {path_name(path): route for path, route in jax.tree_util.tree_flatten_with_path(self._routes)[0]}
        return jax.tree_util.tree_map_with_path(lambda path, leaf: routes[path_name(path)].reduce(leaf), gradients)

    def sum(self, tree: Any) -> Any:
        """Sums over all devices what each has of its own tokens."""
        # All at the end: a count that depends on nothing else would be summed early on some devices and late on others,
        # which XLA's CPU backend doesn't survive where several processes train (seen in JAX 0.10.2: they wait forever).
        return lax.psum(lax.optimization_barrier(tree), self._token_axes)


@dataclass(frozen=True)
class _Route:
    """The way of one parameter from its shards, and of its gradient back."""

    is_of_layer_matrix: bool
    split_dim: int
    split_axes: tuple[str, ...]
    """The axes that `split_dim` lies on; none: the parameter is whole on every device."""
    sum_axes: tuple[str, ...]
    """The other axes over which its gradient is summed."""
    unmapped: P
    """The part of its partition that is left to XLA's partitioner."""
    wire_dtype: jnp.dtype
    """The dtype in which it is gathered."""
    dtype: jnp.dtype
    """The dtype in which it is used, and its gradient made."""

    @staticmethod
    def of(name: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh, compute_dtype: jnp.dtype) -> _Route:
        token_axes, spec = _that_split(TOKEN_AXES, mesh), leaf.sharding.spec
        unmapped = _only(spec, frozenset(AXES) - _mapped_axes(mesh))
        if STATE_AXES not in spec:
            return _Route(False, 0, (), token_axes, unmapped, leaf.dtype, leaf.dtype)
        split_axes = _that_split(STATE_AXES, mesh)
        sum_axes = tuple(axis for axis in token_axes if axis not in split_axes)
        is_of_layer = _name_in_layer(name) is not None
        dtype = compute_dtype if is_of_layer else leaf.dtype
        wire_dtype = compute_dtype if split_axes else dtype
        return _Route(is_of_layer, spec.index(STATE_AXES), split_axes, sum_axes, unmapped, wire_dtype, dtype)

    def of_one_layer(self) -> _Route:
        """For a layer's array, which lacks the stack's leading dim."""
        return replace(self, split_dim=self.split_dim - 1, unmapped=P(*self.unmapped[1:]))

    def gather(self, shard: Array) -> Array:
        def gather(shard: Array) -> Array:
            if self.is_of_layer_matrix:
                return lax.all_gather(shard, self.split_axes, axis=self.split_dim, tiled=True)
            of_devices = jnp.moveaxis(lax.all_gather(shard, self.split_axes), 0, self.split_dim)
            return _in_one_piece(lax.collapse(of_devices, self.split_dim, self.split_dim + 2))

        whole = shard.astype(self.wire_dtype)
        return (self._map_rest(gather)(whole) if self.split_axes else whole).astype(self.dtype)

    def reduce(self, gradient: Array) -> Array:
        def reduce(gradient: Array) -> Array:
            if self.split_axes:
                gradient = self._sum_shards(gradient)
            return lax.psum(gradient, self.sum_axes)

        return self._map_rest(reduce)(gradient.astype(at_least_float32(gradient.dtype)))

    def _sum_shards(self, gradient: Array) -> Array:
        """This device's shard of the sum."""
        if self.is_of_layer_matrix:
            return lax.psum_scatter(gradient, self.split_axes, scatter_dimension=self.split_dim, tiled=True)
        gradient = _in_one_piece(gradient)
        shape, num_shards = gradient.shape, lax.axis_size(self.split_axes)
        before, after = shape[: self.split_dim], shape[self.split_dim + 1 :]
        shards = gradient.reshape(*before, num_shards, shape[self.split_dim] // num_shards, *after)
        return lax.psum_scatter(jnp.moveaxis(shards, self.split_dim, 0), self.split_axes)

    def _map_rest(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """Maps the axes that no one has mapped: the partitioner would gather over them what is sent over others."""
        axes = {axis for entry in self.unmapped for axis in axes_of(entry)}
        if not axes:
            return function
        return jax.shard_map(
            function, in_specs=self.unmapped, out_specs=self.unmapped, axis_names=axes, check_vma=False
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(route: _Route, shard: Array) -> Array:
    return route.gather(shard)


_gather.defvjp(lambda route, shard: (route.gather(shard), None), lambda route, _, gradient: (route.reduce(gradient),))


def _in_one_piece(matrix: Array) -> Array:
    """The matrix, row after row in memory.

    XLA would lay it out by the dim that is split, or as the head's kernel takes it. A matmul takes and makes a layer's
    matrices in any order, but the embedding's rows are looked up, and added to one by one.
    """
    return with_layout_constraint(matrix, Layout(tuple(range(matrix.ndim))))


def _mapped_axes(mesh: Mesh) -> frozenset[str]:
    """Those of the tokens, and those that split nothing, so that XLA's partitioner has the less to do."""
    return frozenset(axis for axis in AXES if axis in TOKEN_AXES or mesh.shape[axis] == 1)


def _that_split(axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _only(spec: P, axes: frozenset[str]) -> P:
    """The part of a spec that names some of the axes."""
    return P(*(tuple(axis for axis in axes_of(entry) if axis in axes) or None for entry in spec))


def _name_in_layer(name: str) -> str | None:
    """`blocks.0.mlp.up.kernel` → `mlp.up.kernel`; None: not a layer's."""
    found = re.fullmatch(r"blocks\.\d+\.(.*)", name)
    return found[1] if found else None
