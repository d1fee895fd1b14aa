"""Gemma 2 (arXiv:2408.00118): norms on both sides, soft caps, and windows in every other layer."""

import math

from layers.pretrained.config_keys import Key, Keys, optional_number
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


FAMILY = Family(
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
