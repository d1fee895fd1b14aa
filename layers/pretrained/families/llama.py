"""Llama 2 and 3, and two families that change it little: SmolLM3, and Phi-3 and 4."""

from layers.pretrained.config_keys import Keys, flag
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule, has_rope
from layers.pretrained.steps import TensorRow

LLAMA = Family(
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
"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""


def slides_without_rope(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    return [FULL if turned else SLIDING for turned in has_rope(keys, "no_rope_layers", num_layers)]


SMOLLM3 = Family(
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
"""SmolLM3: Llama without a rotary embedding in every fourth layer (arXiv:2501.18795)."""

_PHI3_LAYER = "model.layers.{layer}."
_PHI3_QUERY_KEY_VALUE = tuple(f"blocks.*.attention.{name}.kernel" for name in ("query", "key", "value"))

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=(*decoder.SIZES, decoder.kv_heads(), decoder.head_dim(), decoder.norm_epsilon(1e-5), decoder.tied()),
    fixed={"mlp": "swiglu"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(windows="all", partial_rope=True, longrope_alone=True),
    rows=(
        *decoder.vocabulary(),
        TensorRow(_PHI3_LAYER + "self_attn.qkv_proj.weight", _PHI3_QUERY_KEY_VALUE, "(N H) W -> W N H"),
        TensorRow(_PHI3_LAYER + "self_attn.o_proj.weight", "blocks.*.attention.output.kernel", "W (N H) -> N H W"),
        *decoder.pre_norms(),
        TensorRow(
            _PHI3_LAYER + "mlp.gate_up_proj.weight",
            ("blocks.*.mlp.gate.kernel", "blocks.*.mlp.up.kernel"),
            "F W -> W F",
        ),
        TensorRow(_PHI3_LAYER + "mlp.down_proj.weight", "blocks.*.mlp.down.kernel", "W F -> F W"),
    ),
)
"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with joined projections, and longrope."""

FAMILIES = (LLAMA, SMOLLM3, PHI3)
