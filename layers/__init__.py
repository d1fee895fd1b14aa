"""Flax layers over `kernels`: attention, rotary embedding, norm, MLP and a GPT.

`GPTConfig` and the classes of its fields are plain data and load at once; the rest loads with its first use, so that a
config can be read and checked without importing Flax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flax_longcontext import require_ours, warn_of_neighbours

require_ours("kernels", importer=__name__)
warn_of_neighbours(__name__)

from layers.config import GPTConfig, MoEConfig  # noqa: E402, it imports `kernels`
from layers.layer_config import LayerOverride  # noqa: E402
from layers.rope_scaling import RopeScaling  # noqa: E402

if TYPE_CHECKING:
    from layers.activation_sharding import ActivationSharding
    from layers.attention import Attention
    from layers.block import Block
    from layers.decoding import init_caches, unroll_params, unrolled_config
    from layers.flax_interop import attention_fn
    from layers.gpt import GPT
    from layers.mlp import MLP
    from layers.moe import MoE
    from layers.norm import RMSNorm
    from layers.rotary import apply_rope

_MODULE_OF = {
    "ActivationSharding": "layers.activation_sharding",
    "Attention": "layers.attention",
    "Block": "layers.block",
    "GPT": "layers.gpt",
    "MLP": "layers.mlp",
    "MoE": "layers.moe",
    "RMSNorm": "layers.norm",
    "apply_rope": "layers.rotary",
    "attention_fn": "layers.flax_interop",
    "init_caches": "layers.decoding",
    "unroll_params": "layers.decoding",
    "unrolled_config": "layers.decoding",
}

__all__ = [
    "GPT",
    "MLP",
    "ActivationSharding",
    "Attention",
    "Block",
    "GPTConfig",
    "LayerOverride",
    "MoE",
    "MoEConfig",
    "RMSNorm",
    "RopeScaling",
    "apply_rope",
    "attention_fn",
    "init_caches",
    "unroll_params",
    "unrolled_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'layers' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
