"""OLMo 2 and OLMo 3."""

import dataclasses

from layers.pretrained.config_keys import Keys
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule
from layers.pretrained.steps import TensorRow

_LAYER = "model.layers.{layer}."

_NORMS = (
    TensorRow(_LAYER + "post_attention_layernorm.weight", "blocks.*.attention_post_norm.scale", "W -> W"),
    TensorRow(_LAYER + "post_feedforward_layernorm.weight", "blocks.*.mlp_post_norm.scale", "W -> W"),
)

OLMO2 = Family(
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
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.qk_norms(), *_NORMS, *decoder.gated_mlp()),
)
"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all heads' queries and keys together."""


def three_of_four_slide(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    return [SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers)]


OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    rule=LayerRule(
        windows="by_type",
        default_window=4096,
        default_types=three_of_four_slide,
        default_base=500_000.0,
        old_default_base=10_000.0,
        rope_by_type=True,
        sliding_default_base=500_000.0,
    ),
)
"""OLMo 3: OLMo 2 with windows in three layers of four, and YaRN in the fourth alone."""

FAMILIES = (OLMO2, OLMO3)
