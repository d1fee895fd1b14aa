"""Gemma 2, Gemma 3's language model, and the same within its multimodal models."""

import dataclasses
import math

from layers.pretrained.config_keys import Key, Keys, integer, number_of_parts, optional_number
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule
from layers.pretrained.steps import TensorRow


def every_other_slides(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    return [FULL if layer % 2 else SLIDING for layer in range(num_layers)]


def _scalar(scale: float) -> int | float:
    # transformers wants an integer here.
    scalar = round(scale**-2)
    return scalar if scalar and scalar**-0.5 == scale else scale**-2


QUERY_SCALE = Key(
    "query_pre_attn_scalar",
    ("query_scale",),
    Keys.number,
    256.0,
    into=lambda scalar: scalar**-0.5,
    back=_scalar,
)


def norms(prefix: str = "model.") -> tuple[TensorRow, ...]:
    """The norms before and after attention, and before and after the MLP."""
    layer = prefix + "layers.{layer}."
    return (
        TensorRow(layer + "input_layernorm.weight", "blocks.*.attention_norm.scale", "W -> W"),
        TensorRow(layer + "post_attention_layernorm.weight", "blocks.*.attention_post_norm.scale", "W -> W"),
        TensorRow(layer + "pre_feedforward_layernorm.weight", "blocks.*.mlp_norm.scale", "W -> W"),
        TensorRow(layer + "post_feedforward_layernorm.weight", "blocks.*.mlp_post_norm.scale", "W -> W"),
    )


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(4),
        decoder.head_dim(256),
        decoder.norm_epsilon(),
        decoder.tied(default=True),
        decoder.biases(),
        QUERY_SCALE,
        optional_number("attn_logit_softcapping", "logits_soft_cap", default=50.0),
        optional_number("final_logit_softcapping", "final_logits_soft_cap", default=30.0),
    ),
    fixed={"mlp": "geglu", "norm_placement": "both", "norm_scale_offset": 1.0},
    required={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    derived={"embedding_scale": lambda settings: math.sqrt(settings["width"])},
    rule=LayerRule(windows="by_type", default_window=4096, default_types=every_other_slides),
    rows=(*decoder.vocabulary(), *decoder.attention(), *norms(), *decoder.gated_mlp()),
)
"""Gemma 2 (arXiv:2408.00118): norms on both sides, soft caps, and windows in every other layer."""


def one_in_a_few_is_full(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    pattern = keys.integer("sliding_window_pattern", 6)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


GEMMA3_TEXT = Family(
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
"""Gemma 3's language model (arXiv:2503.19786): five layers with windows to each without, and a base for each kind."""

_GEMMA3_PREFIX = "language_model.model."

GEMMA3 = dataclasses.replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    section="text_config",
    rows=(
        *decoder.vocabulary(_GEMMA3_PREFIX, "language_model.lm_head.weight"),
        *decoder.attention(_GEMMA3_PREFIX),
        *decoder.qk_norms(_GEMMA3_PREFIX),
        *norms(_GEMMA3_PREFIX),
        *decoder.gated_mlp(_GEMMA3_PREFIX),
    ),
    unused=("vision_tower.", "multi_modal_projector."),
)
"""The language model within Gemma 3's multimodal models; it is saved as one of its own."""

FAMILIES = (GEMMA2, GEMMA3_TEXT, GEMMA3)
