"""Qwen 2, Qwen 3 and its mixture of experts."""

from layers.pretrained.config_keys import Keys, flag, integer, number
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import FULL, SLIDING, LayerRule
from layers.pretrained.steps import TensorRow


def upper_layers_slide(keys: Keys, num_layers: int) -> list[str]:
    """The layers' types where no key lists them."""
    first = keys.integer("max_window_layers", 28) if keys.values.get("max_window_layers") != 0 else 0
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


QWEN2 = Family(
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
"""Qwen 2 and 2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values, and windows in the upper layers."""

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(32),
        decoder.head_dim(128),
        decoder.norm_epsilon(),
        decoder.tied(),
        decoder.biases(),
    ),
    fixed={"mlp": "swiglu", "qk_norm": "per_head"},
    required={"hidden_act": ("silu", "swish")},
    rule=QWEN2.rule,
    rows=(
        *decoder.vocabulary(),
        *decoder.attention(),
        *decoder.qk_norms(),
        *decoder.pre_norms(),
        *decoder.gated_mlp(),
    ),
)
"""Qwen 3 (arXiv:2505.09388): norms over each head's queries and keys."""

_QWEN3_MLP = "model.layers.{layer}.mlp."

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(
        *decoder.SIZES,
        decoder.kv_heads(4),
        decoder.head_dim(),
        decoder.norm_epsilon(),
        decoder.tied(),
        decoder.biases(),
        # transformers 5 writes the other name.
        decoder.num_experts(
            "num_experts", "num_local_experts", default=lambda keys: keys.number_of_parts("num_local_experts", 128)
        ),
        integer("num_experts_per_tok", "moe.num_experts_per_token", default=8),
        integer("moe_intermediate_size", "moe.expert_width", default=768),
        flag("norm_topk_prob", "moe.normalize_top_k", default=False),
        number("router_aux_loss_coef", "moe.load_balance_loss_weight", default=0.001),
    ),
    fixed={"mlp": "swiglu", "qk_norm": "per_head", "moe": {"router_z_loss_weight": 0.0}},
    required={"hidden_act": ("silu", "swish"), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    rule=LayerRule(windows="all", default_window=4096, switch="use_sliding_window"),
    rows=(
        *decoder.vocabulary(),
        *decoder.attention(),
        *decoder.qk_norms(),
        *decoder.pre_norms(),
        TensorRow(_QWEN3_MLP + "gate.weight", "blocks.*.mlp.router.kernel", "E W -> W E"),
        TensorRow(_QWEN3_MLP + "experts.{expert}.gate_proj.weight", "blocks.*.mlp.experts.gate.kernel", "F W -> W F"),
        TensorRow(_QWEN3_MLP + "experts.{expert}.up_proj.weight", "blocks.*.mlp.experts.up.kernel", "F W -> W F"),
        TensorRow(_QWEN3_MLP + "experts.{expert}.down_proj.weight", "blocks.*.mlp.experts.down.kernel", "W F -> F W"),
    ),
)
"""Qwen 3's mixture of experts (arXiv:2505.09388)."""

FAMILIES = (QWEN2, QWEN3, QWEN3_MOE)
