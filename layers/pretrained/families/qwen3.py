"""Qwen 3 (arXiv:2505.09388): norms over each head's queries and keys."""

from layers.pretrained.families import decoder
from layers.pretrained.families.qwen2 import upper_layers_slide
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(32),
        decoder.head_dim(128),
        decoder.norm_epsilon(),
        decoder.tied(),
        decoder.biases(),
    ),
    fixed={"mlp": "swiglu", "qk_norm": "per_head"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(
        windows="by_type", default_window=4096, switch="use_sliding_window", default_types=upper_layers_slide
    ),
    rows=(
        *decoder.vocabulary(),
        *decoder.attention(),
        *decoder.qk_norms(),
        *decoder.pre_norms(),
        *decoder.gated_mlp(),
    ),
)
