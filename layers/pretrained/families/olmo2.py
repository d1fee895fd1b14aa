"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all heads' queries and keys together."""

from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule
from layers.pretrained.steps import TensorRow

_LAYER = "model.layers.{layer}."

NORMS = (
    TensorRow(_LAYER + "post_attention_layernorm.weight", "blocks.*.attention_post_norm.scale", "W -> W"),
    TensorRow(_LAYER + "post_feedforward_layernorm.weight", "blocks.*.mlp_post_norm.scale", "W -> W"),
)

FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(),
        decoder.head_dim(),
        decoder.norm_epsilon(1e-5),
        decoder.tied(),
        decoder.biases(),
    ),
    fixed={"mlp": "swiglu", "norm_placement": "post", "qk_norm": "whole"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(),
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.qk_norms(), *NORMS, *decoder.gated_mlp()),
)
