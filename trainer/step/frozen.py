"""The two parts of a model's parameters: those that train, and those that `lora` freezes.

The state holds them together, by their names in the model, so that whatever reads a model needs not know. The frozen
ones are bfloat16. Gradients, the optimizer and checkpoints see the trained ones alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layers import LoRAConfig

FROZEN_DTYPE = jnp.bfloat16


def split_frozen(lora: LoRAConfig, params: Any) -> tuple[Any, Any]:
    """The part of a tree of parameters that trains, and the frozen part.

    Args:
      lora: says which.
      params: nested dict of anything by the parameters' names.

    Returns:
      Two such dicts. Without adapters the first is `params` itself, and the second is empty.
    """
    if lora.rank is None:
        return params, {}
    flat = flatten_dict(params)
    trained = {path: leaf for path, leaf in flat.items() if lora.trains(".".join(map(str, path)))}
    frozen = {path: leaf for path, leaf in flat.items() if path not in trained}
    return unflatten_dict(trained), unflatten_dict(frozen)


def join_frozen(trained: Any, frozen: Any) -> Any:
    """The tree that `split_frozen` split."""
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen)) if frozen else trained


def without_adapters(params: Any) -> Any:
    """The tree without the adapters: as of the base."""
    return unflatten_dict({path: leaf for path, leaf in flatten_dict(params).items() if "lora" not in path})


def with_frozen_dtype(lora: LoRAConfig, params: Any) -> Any:
    """The parameters with the frozen ones in bfloat16."""
    trained, frozen = split_frozen(lora, params)
    return join_frozen(trained, jax.tree.map(lambda leaf: leaf.astype(FROZEN_DTYPE), frozen))
