"""Mistral, and Mixtral, its mixture of experts."""

from layers.pretrained.config_keys import integer, number
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule
from layers.pretrained.steps import TensorRow

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(*decoder.SIZES, decoder.kv_heads(8), decoder.head_dim(), decoder.norm_epsilon(), decoder.tied()),
    fixed={"mlp": "swiglu"},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(windows="all_or_by_type", default_window=4096),
    rows=(*decoder.vocabulary(), *decoder.attention(), *decoder.pre_norms(), *decoder.gated_mlp()),
)
"""Mistral (arXiv:2310.06825): Llama with a window in every layer, in none, or in those of a type (Ministral)."""

_MIXTRAL_MOE = "model.layers.{layer}.block_sparse_moe."

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=(
        *decoder.SIZES[:-1],
        decoder.kv_heads(8),
        integer("intermediate_size", "moe.expert_width", "mlp_width"),
        decoder.head_dim(),
        decoder.norm_epsilon(1e-5),
        decoder.tied(),
        decoder.num_experts("num_local_experts", "num_experts", default=8),
        integer("num_experts_per_tok", "moe.num_experts_per_token", default=2),
        number("router_aux_loss_coef", "moe.load_balance_loss_weight", default=0.001),
    ),
    fixed={"mlp": "swiglu", "moe": {"normalize_top_k": True, "router_z_loss_weight": 0.0}},
    required={"hidden_act": ("silu", "swish")},
    rule=LayerRule(windows="all", default_base=1_000_000.0),
    rows=(
        *decoder.vocabulary(),
        *decoder.attention(),
        *decoder.pre_norms(),
        TensorRow(_MIXTRAL_MOE + "gate.weight", "blocks.*.mlp.router.kernel", "E W -> W E"),
        TensorRow(_MIXTRAL_MOE + "experts.{expert}.w1.weight", "blocks.*.mlp.experts.gate.kernel", "F W -> W F"),
        TensorRow(_MIXTRAL_MOE + "experts.{expert}.w3.weight", "blocks.*.mlp.experts.up.kernel", "F W -> W F"),
        TensorRow(_MIXTRAL_MOE + "experts.{expert}.w2.weight", "blocks.*.mlp.experts.down.kernel", "W F -> F W"),
    ),
)
"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts."""

FAMILIES = (MISTRAL, MIXTRAL)
