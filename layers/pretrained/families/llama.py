"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""

from layers.pretrained.config_keys import flag
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(),
        decoder.head_dim(),
        decoder.norm_epsilon(),
        decoder.tied(),
        decoder.biases(),
        flag("mlp_bias", "mlp_bias", default=False),
    ),
    fixed={"mlp": "swiglu"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(),
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.pre_norms(), *decoder.gated_mlp()),
    unused=(".rotary_emb.inv_freq",),
)
