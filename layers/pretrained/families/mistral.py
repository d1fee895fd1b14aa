"""Mistral (arXiv:2310.06825): Llama with a window in every layer, in none, or in those of a type (Ministral)."""

from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(*decoder.SIZES, decoder.kv_heads(8), decoder.head_dim(), decoder.norm_epsilon(), decoder.tied()),
    fixed={"mlp": "swiglu"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(windows="all_or_by_type", default_window=4096),
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.pre_norms(), *decoder.gated_mlp()),
)
