"""Projections: their initial values, and their features split over a mesh axis that tokens are split over, too.

The ranks gather the tokens before the first matmuls, and sum up each others' products after the last one, of which each
keeps its tokens again (sequence parallelism, arXiv:2205.05198).

Shapes: B batch, T tokens, t tokens of a device, W width, F features, whose last dims may be several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from kernels.collectives import ChosenCollectives, all_gather_matmul, matmul_reduce_scatter
from layers.activation_sharding import ActivationSharding
from layers.adapted_products import AdaptedMatrix, into_features, out_of_features

Projection = nnx.Linear | nnx.LinearGeneral


def small_init(width: int, *, num_layers: int | None = None) -> nnx.Initializer:
    """Normal with deviation √(2 / 5·width): GPT-2's 0.02 near its width, larger in narrower networks.

    Args:
      width: features of the residual stream.
      num_layers: given for a matrix that adds to the residual stream, which starts smaller by
        √(2 · num_layers), the root of the number of additions, as in GPT-2; None for the others.

    Source: Nguyen and Salazar, arXiv:1910.05895.
    """
    deviation = (2 / (5 * width)) ** 0.5
    return nnx.initializers.normal(deviation if num_layers is None else deviation / (2 * num_layers) ** 0.5)


def project(
    sharding: ActivationSharding | None, inputs: Float[Array, "B T W"], *projections: Projection
) -> tuple[Float[Array, "B T F ..."], ...]:
    """Projects the residual stream to features that are split over `head_axis` in their first dim.

    Args:
      sharding: of the activations; None: one device's.
      inputs: the residual stream, normed.
      projections: from W to F features.

    Raises:
      ValueError: `sharding.collectives` names the kernels, and they can't serve.
    """
    adapted = [projection for projection in projections if _lora(projection) is not None]
    if adapted and (sharding is None or not _splits_features(sharding)):
        return _project_adapted(sharding, inputs, projections, adapted)
    products = _project(sharding, inputs, *projections)
    if not adapted or sharding is None:
        return products
    return tuple(
        product + _added(sharding, inputs, projection) if projection in adapted else product
        for product, projection in zip(products, projections, strict=True)
    )


def _project(
    sharding: ActivationSharding | None, inputs: Float[Array, "B T W"], *projections: Projection
) -> tuple[Float[Array, "B T F ..."], ...]:
    """The products by the projections' own matrices."""
    if sharding is None:
        return tuple(projection(inputs) for projection in projections)
    features = [projection.kernel.shape[1:] for projection in projections]
    chosen = _choose(sharding, inputs.shape, features, *projections)
    if chosen is None:
        inputs = sharding.gather_tokens(inputs)
        return tuple(sharding.constrain_features(projection(inputs)) for projection in projections)
    layout, axis = sharding.layout, sharding.head_axis

    def on_device(part: Float[Array, "B t W"], *kernels: Float[Array, "W F ..."]) -> tuple[Array, ...]:
        products = all_gather_matmul(part, tuple(lax.collapse(kernel, 1) for kernel in kernels), axis, chosen)
        return tuple(
            product.reshape(*product.shape[:2], *kernel.shape[1:])
            for product, kernel in zip(products, kernels, strict=True)
        )

    feature_spec = P(layout.batch_axes, layout.sequence_axis, axis)
    products = layout.map(
        on_device,
        (inputs.astype(projections[0].dtype), *map(_kernel, projections)),
        (sharding.residual_spec, *[P(None, axis)] * len(projections)),
        (feature_spec,) * len(projections),
    )
    return tuple(map(_with_bias, products, projections))


def _project_adapted(
    sharding: ActivationSharding | None,
    inputs: Float[Array, "B T W"],
    projections: Sequence[Projection],
    adapted: Sequence[Projection],
) -> tuple[Float[Array, "B T F ..."], ...]:
    """The products where some projections have adapters and no axis splits features."""
    dtype, scale = adapted[0].dtype, _lora(adapted[0]).scale
    of_adapted = iter(into_features(inputs.astype(dtype), tuple(_adapted_matrix(each, 1) for each in adapted), scale))
    products = []
    for projection in projections:
        if projection in adapted:
            features = next(of_adapted).reshape(*inputs.shape[:-1], *projection.kernel.shape[1:])
            product = _with_bias(features, projection)
        else:
            product = projection(inputs)
        products.append(product if sharding is None else sharding.constrain_features(product))
    return tuple(products)


def _added(
    sharding: ActivationSharding, inputs: Float[Array, "B T W"], projection: Projection
) -> Float[Array, "B T F ..."]:
    """The adapter's part where an axis splits features: its r features are all that ranks gather for it."""
    reduced = sharding.gather_tokens(_lora(projection).reduce(inputs, projection.dtype))
    return sharding.constrain_features(_lora(projection).expand(reduced))


def project_back(
    sharding: ActivationSharding | None, features: Float[Array, "B T F ..."], projection: Projection
) -> Float[Array, "B T W"]:
    """Projects features that are split over `head_axis` in their first dim back to the residual stream.

    Args:
      sharding: of the activations; None: one device's.
      features: heads, or the MLP's hidden features.
      projection: from F to W features.

    Raises:
      ValueError: `sharding.collectives` names the kernels, and they can't serve.
    """
    if (lora := _lora(projection)) is None:
        return _project_back(sharding, features, projection)
    if sharding is not None and _splits_features(sharding):
        reduced = sharding.scatter_tokens(lora.reduce(features, projection.dtype))
        return _project_back(sharding, features, projection) + lora.expand(reduced)
    flat = features.reshape(*features.shape[:2], -1).astype(projection.dtype)
    product = out_of_features(flat, _adapted_matrix(projection, projection.kernel.ndim - 1), lora.scale)
    product = _with_bias(product, projection)
    return product if sharding is None else sharding.scatter_tokens(product)


def _project_back(
    sharding: ActivationSharding | None, features: Float[Array, "B T F ..."], projection: Projection
) -> Float[Array, "B T W"]:
    """The product by the projection's own matrix."""
    if sharding is None:
        return projection(features)
    *feature_spec, width = projection.kernel.shape
    chosen = _choose(sharding, (*features.shape[:2], width), [tuple(feature_spec)], projection)
    if chosen is None:
        return sharding.scatter_tokens(projection(features))
    layout, axis = sharding.layout, sharding.head_axis

    def on_device(features: Float[Array, "B T F ..."], kernel: Float[Array, "F ... W"]) -> Float[Array, "B t W"]:
        return matmul_reduce_scatter(lax.collapse(features, 2), lax.collapse(kernel, 0, -1), axis, chosen)

    outputs = layout.map(
        on_device,
        (features.astype(projection.dtype), _kernel(projection)),
        (P(layout.batch_axes, layout.sequence_axis, axis), P(axis)),
        sharding.residual_spec,
    )
    return _with_bias(outputs, projection)


def _lora(projection: Projection) -> Any:
    """The projection's `layers.lora.LoRA`; None: it has no adapter."""
    return getattr(projection, "lora", None)


def _splits_features(sharding: ActivationSharding) -> bool:
    return sharding.mesh.shape[sharding.head_axis] > 1


def _adapted_matrix(projection: Projection, num_inputs: int) -> AdaptedMatrix:
    """A projection's matrix and adapter, whose first dims are inputs, as matrices."""
    kernel, lora = _kernel(projection), _lora(projection)
    num_features = math.prod(kernel.shape[:num_inputs])
    rank = lora.a.shape[-1]
    a, b = lora.a[...].reshape(num_features, rank), lora.b[...].reshape(rank, -1)
    return AdaptedMatrix(kernel.reshape(num_features, -1), a, b)


def _choose(
    sharding: ActivationSharding, shape: tuple[int, ...], features: Sequence[tuple[int, ...]], *projections: Projection
) -> ChosenCollectives | None:
    """As `ActivationSharding.choose_collectives`; None also for projections with more than a matrix and a bias."""
    if not all(map(_is_plain, projections)):
        return None
    return sharding.choose_collectives(shape, features, jnp.dtype(projections[0].dtype))


def _is_plain(projection: Projection) -> bool:
    """True for Flax's own projection without settings that the matmuls here would ignore."""
    return (
        type(projection) in (nnx.Linear, nnx.LinearGeneral)
        and projection.dtype is not None
        and projection.precision is None
        and projection.preferred_element_type is None
    )


def _kernel(projection: Projection) -> Array:
    return projection.kernel[...].astype(projection.dtype)


def _with_bias(product: Array, projection: Projection) -> Array:
    return product if projection.bias is None else product + projection.bias[...].astype(projection.dtype)
