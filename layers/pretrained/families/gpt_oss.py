"""gpt-oss (arXiv:2508.10925): sinks, windows in every other layer, and clamped experts, in bfloat16 or in MXFP4."""

from layers.pretrained.config_keys import integer, number
from layers.pretrained.families import decoder
from layers.pretrained.families.gemma import every_other_slides
from layers.pretrained.family import Family
from layers.pretrained.layer_kinds import LayerRule
from layers.pretrained.mxfp4 import with_unpacked_blocks
from layers.pretrained.steps import TensorRow

_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "mlp."


def _experts(*names: str) -> tuple[str, ...]:
    return tuple(f"blocks.*.mlp.experts.{name}" for name in names)


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=(
        *decoder.SIZES[:-1],
        decoder.kv_heads(8),
        integer("intermediate_size", "moe.expert_width", "mlp_width"),
        decoder.head_dim(64),
        decoder.norm_epsilon(1e-5),
        decoder.tied(),
        decoder.biases(default=True),
        decoder.num_experts("num_local_experts", "num_experts", default=128),
        integer("num_experts_per_tok", "moe.num_experts_per_token", default=4),
        number("router_aux_loss_coef", "moe.load_balance_loss_weight", default=0.001),
    ),
    fixed={
        "mlp": "clamped_swiglu",
        "sinks": True,
        "moe": {"normalize_top_k": True, "router_bias": True, "expert_bias": True, "router_z_loss_weight": 0.0},
    },
    required={"hidden_act": ("silu", "swish"), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    rule=LayerRule(
        windows="by_type",
        default_window=128,
        default_types=every_other_slides,
        default_base=150_000.0,
        default_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    rows=(
        *decoder.vocabulary(),
        *decoder.attention(),
        TensorRow(_LAYER + "self_attn.sinks", "blocks.*.attention.sinks", "N -> N"),
        *decoder.pre_norms(),
        TensorRow(_MLP + "router.weight", "blocks.*.mlp.router.kernel", "E W -> W E"),
        TensorRow(_MLP + "router.bias", "blocks.*.mlp.router.bias", "E -> E"),
        TensorRow(
            _MLP + "experts.gate_up_proj",
            _experts("gate.kernel", "up.kernel"),
            "E W F -> E W F",
            join="interleaved",
            axis=2,
        ),
        TensorRow(
            _MLP + "experts.gate_up_proj_bias",
            _experts("gate.bias", "up.bias"),
            "E F -> E F",
            join="interleaved",
            axis=1,
        ),
        TensorRow(_MLP + "experts.down_proj", "blocks.*.mlp.experts.down.kernel", "E F W -> E F W"),
        TensorRow(_MLP + "experts.down_proj_bias", "blocks.*.mlp.experts.down.bias", "E W -> E W"),
    ),
    adapt=with_unpacked_blocks,
    quantization="mxfp4",
)

FAMILIES = (GPT_OSS,)
