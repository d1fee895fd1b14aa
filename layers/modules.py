"""The public names of `layers` that need Flax: `layers` loads this module when one of them is first used."""

from layers.activation_sharding import ActivationSharding
from layers.attention import Attention
from layers.decoding import init_caches, unroll_params, unrolled_config
from layers.flax_interop import attention_fn
from layers.gpt import GPT
from layers.mlp import MLP
from layers.moe import MoE
from layers.norm import RMSNorm
from layers.rotary import apply_rope

__all__ = [
    "GPT",
    "MLP",
    "ActivationSharding",
    "Attention",
    "MoE",
    "RMSNorm",
    "apply_rope",
    "attention_fn",
    "init_caches",
    "unroll_params",
    "unrolled_config",
]
