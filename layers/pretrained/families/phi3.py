"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with joined projections, and longrope."""

from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule
from layers.pretrained.steps import TensorRow

_LAYER = "model.layers.{layer}."
_QUERY_KEY_VALUE = tuple(f"blocks.*.attention.{name}.kernel" for name in ("query", "key", "value"))

FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=(*decoder.SIZES, decoder.kv_heads(), decoder.head_dim(), decoder.norm_epsilon(1e-5), decoder.tied()),
    fixed={"mlp": "swiglu"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(windows="all", partial_rope=True, longrope_alone=True),
    rows=(
        *decoder.vocabulary(),
        TensorRow(_LAYER + "self_attn.qkv_proj.weight", _QUERY_KEY_VALUE, "(N H) W -> W N H"),
        TensorRow(_LAYER + "self_attn.o_proj.weight", "blocks.*.attention.output.kernel", "W (N H) -> N H W"),
        *decoder.pre_norms(),
        TensorRow(
            _LAYER + "mlp.gate_up_proj.weight",
            ("blocks.*.mlp.gate.kernel", "blocks.*.mlp.up.kernel"),
            "F W -> W F",
        ),
        TensorRow(_LAYER + "mlp.down_proj.weight", "blocks.*.mlp.down.kernel", "W F -> F W"),
    ),
)
