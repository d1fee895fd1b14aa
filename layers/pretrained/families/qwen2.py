"""Qwen 2 and 2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values, and windows in the upper layers."""

from layers.pretrained.config_keys import Keys
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule


def upper_layers_slide(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    first = keys.integer("max_window_layers", 28) if keys.values.get("max_window_layers") != 0 else 0
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=(*decoder.SIZES, decoder.kv_heads(32), decoder.head_dim(), decoder.norm_epsilon(), decoder.tied()),
    fixed={"mlp": "swiglu", "attention_bias": True},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(
        windows="by_type", default_window=4096, switch="use_sliding_window", default_types=upper_layers_slide
    ),
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.pre_norms(), *decoder.gated_mlp()),
)
