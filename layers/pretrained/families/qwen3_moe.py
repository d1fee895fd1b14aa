"""Qwen 3's mixture of experts (arXiv:2505.09388)."""

from layers.pretrained.config_keys import flag, integer, number
from layers.pretrained.families import decoder
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule
from layers.pretrained.steps import TensorRow

_MLP = "model.layers.{layer}.mlp."

FAMILY = Family(
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
        TensorRow(_MLP + "gate.weight", "blocks.*.mlp.router.kernel", "E W -> W E"),
        TensorRow(_MLP + "experts.{expert}.gate_proj.weight", "blocks.*.mlp.experts.gate.kernel", "F W -> W F"),
        TensorRow(_MLP + "experts.{expert}.up_proj.weight", "blocks.*.mlp.experts.up.kernel", "F W -> W F"),
        TensorRow(_MLP + "experts.{expert}.down_proj.weight", "blocks.*.mlp.experts.down.kernel", "W F -> F W"),
    ),
)
