"""Low-rank adapters of a block's matrices (LoRA, arXiv:2106.09685).

A projection with an adapter computes x W + (x A) B · alpha / rank, in that order: a sum W + A B · alpha / rank would
cost a product as large as W, and its memory, in each step. B begins at 0, so that the model begins as its base.

Shapes: L layers of a stack, E experts, r rank.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from layers.config import GPTConfig
from layers.gpt import GPT
from layers.lora_config import LoRAConfig


class LoRA(nnx.Module):
    """The adapter of one matrix: A from its inputs to r features, B from these to its outputs.

    Args:
      shape: of the matrix: stacked dims, inputs, outputs.
      num_stacked: leading dims along which there is a matrix for each index: layers, experts.
      num_inputs: dims of the inputs.
      config: the rank, and the factor.
      param_dtype: type that A and B are stored in.
      rngs: source of A, which is uniform up to 1 / √inputs, as in `peft`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        num_stacked: int,
        num_inputs: int,
        config: LoRAConfig,
        *,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        assert config.rank is not None, "there are adapters"
        ends = num_stacked + num_inputs
        bound = math.prod(shape[num_stacked:ends]) ** -0.5
        self.scale = config.scale
        self.a = nnx.Param(jax.random.uniform(rngs.params(), (*shape[:ends], config.rank), param_dtype, -bound, bound))
        self.b = nnx.Param(jnp.zeros((*shape[:num_stacked], config.rank, *shape[ends:]), param_dtype))

    def reduce(self, inputs: Float[Array, "*batch *inputs"], dtype: jnp.dtype) -> Float[Array, "*batch r"]:
        """The inputs times A, by operands of a dtype."""
        a = self.a[...].astype(dtype)
        return jnp.tensordot(inputs.astype(dtype), a, a.ndim - 1)

    def expand(self, reduced: Float[Array, "*batch r"]) -> Float[Array, "*batch *outputs"]:
        """These times B and the factor."""
        return jnp.tensordot(reduced * self.scale, self.b[...].astype(reduced.dtype), 1)


def add_adapters(model: GPT, config: LoRAConfig, rngs: nnx.Rngs) -> None:
    """Gives a model's matrices their adapters.

    Args:
      model: as made; it is changed.
      config: which matrices.
      rngs: source of the adapters.

    Raises:
      ValueError: as `LoRAConfig.matrices`.
    """
    for name in config.matrices(model.config):
        num_stacked = 2 if ".experts." in name else 1
        num_inputs = 2 if name == "attention.output" else 1  # heads and their features
        for block in model.blocks:
            projection: Any = functools.reduce(getattr, name.split("."), block)
            kernel = projection.kernel
            projection.lora = LoRA(kernel.shape, num_stacked, num_inputs, config, param_dtype=kernel.dtype, rngs=rngs)


def merge_adapters(config: LoRAConfig, params: Any) -> Any:
    """The parameters of a model without adapters that computes the same.

    Args:
      config: the factor.
      params: of the model with adapters, a nested dict as `nnx.to_pure_dict` makes it; without any it comes back.

    Returns:
      The same without adapters. A matrix that had one comes in the adapter's dtype.
    """
    if not isinstance(params, dict):
        return params
    merged: dict[Any, Any] = {name: merge_adapters(config, part) for name, part in params.items() if name != "lora"}
    if "lora" in params:
        merged["kernel"] = merge_matrix(params["kernel"], params["lora"]["a"], params["lora"]["b"], config.scale)
    return merged


def merge_matrix(
    kernel: Float[Array, "*stacked *inputs *outputs"],
    a: Float[Array, "*stacked *inputs r"],
    b: Float[Array, "*stacked r *outputs"],
    scale: float,
) -> Float[Array, "*stacked *inputs *outputs"]:
    """W + A B · scale, in the adapter's dtype."""
    num_stacked = a.ndim + b.ndim - kernel.ndim - 2
    stacked = a.shape[:num_stacked]
    rank = a.shape[-1]
    product = jnp.matmul(a.reshape(*stacked, -1, rank), b.reshape(*stacked, rank, -1), precision=lax.Precision.HIGHEST)
    return kernel.astype(a.dtype) + scale * product.reshape(kernel.shape)


@functools.lru_cache(maxsize=8)
def adapted_shapes(model: GPTConfig, config: LoRAConfig) -> Any:
    """As `layers.pretrained.table.parameter_shapes`, with adapters. The same dict for the same arguments."""

    def make() -> GPT:
        made = GPT(model, rngs=nnx.Rngs(0))
        add_adapters(made, config, nnx.Rngs(0))
        return made

    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(make), nnx.Param))
