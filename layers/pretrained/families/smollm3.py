"""SmolLM3: Llama without a rotary embedding in every fourth layer (arXiv:2501.18795)."""

from layers.pretrained.config_keys import Keys, flag
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule, has_rope


def slides_without_rope(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    return [FULL if turned else SLIDING for turned in has_rope(keys, "no_rope_layers", num_layers)]


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(4),
        decoder.head_dim(),
        decoder.norm_epsilon(),
        decoder.tied(default=True),
        decoder.biases(),
        flag("mlp_bias", "mlp_bias", default=False),
    ),
    fixed={"mlp": "swiglu"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(
        windows="by_type",
        switch="use_sliding_window",
        default_types=slides_without_rope,
        default_base=2_000_000.0,
        without_rope="no_rope_layers",
    ),
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.pre_norms(), *decoder.gated_mlp()),
)
