"""Gemma 3's language model (arXiv:2503.19786): five layers with windows to each without, and a base for each kind."""

import math

from layers.pretrained.config_keys import Keys, integer, number_of_parts, optional_number
from layers.pretrained.families import decoder
from layers.pretrained.families.gemma2 import QUERY_SCALE, norms
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule


def one_in_a_few_is_full(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    pattern = keys.integer("sliding_window_pattern", 6)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=(
        decoder.vocabulary_size(262_208),
        integer("hidden_size", "width", default=2304),
        number_of_parts("num_hidden_layers", "num_layers", default=26),
        number_of_parts("num_attention_heads", "num_heads", default=8),
        decoder.kv_heads(4),
        integer("intermediate_size", "mlp_width", default=9216),
        decoder.head_dim(256),
        decoder.norm_epsilon(),
        decoder.tied(default=True),
        decoder.biases(),
        QUERY_SCALE,
        # attn_logit_softcapping is not here: transformers has the key, and caps no logits of attention.
        optional_number("final_logit_softcapping", "final_logits_soft_cap"),
    ),
    fixed={"mlp": "geglu", "norm_placement": "both", "norm_scale_offset": 1.0, "qk_norm": "per_head"},
    required={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)},
    derived={"embedding_scale": lambda settings: math.sqrt(settings["width"])},
    rule=LayerRule(
        windows="by_type",
        default_window=4096,
        default_types=one_in_a_few_is_full,
        default_base=1_000_000.0,
        rope_by_type=True,
        sliding_base_key="rope_local_base_freq",
        sliding_default_base=10_000.0,
    ),
    rows=(
        *decoder.vocabulary(),
        *decoder.attention(),
        *decoder.qk_norms(),
        *norms(),
        *decoder.gated_mlp(),
    ),
)
