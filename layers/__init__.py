"""Flax layers over `kernels`: attention, rotary embedding, norm, MLP and a GPT.

`GPTConfig` and the classes of its fields are plain data and load at once; the rest loads with its first use, so that a
config can be read and checked without importing Flax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax_longcontext import require_ours, warn_of_neighbours

require_ours("kernels", importer=__name__)
warn_of_neighbours(__name__)

from layers.config import GPTConfig, MoEConfig  # noqa: E402, it imports `kernels`
from layers.layer_config import LayerOverride  # noqa: E402
from layers.lora_config import LoRAConfig  # noqa: E402
from layers.rope_scaling import RopeScaling  # noqa: E402

if TYPE_CHECKING:
    from layers.modules import (
        GPT,
        MLP,
        ActivationSharding,
        Attention,
        MoE,
        RMSNorm,
        apply_rope,
        attention_fn,
        init_caches,
        unroll_params,
        unrolled_config,
    )

__all__ = [
    "GPT",
    "MLP",
    "ActivationSharding",
    "Attention",
    "GPTConfig",
    "LayerOverride",
    "LoRAConfig",
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
    if name not in __all__:
        raise AttributeError(f"module 'layers' has no attribute {name!r}")
    from layers import modules

    return getattr(modules, name)
