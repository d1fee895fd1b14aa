"""config.json files as the models' pages have them, in the words of several years.

Keys that no reader of configs uses (tokens' ids, dropout, versions) are left out. A comment above each file names the
public copy that its keys and values were compared with on 2026-11-29. LitGPT's `litgpt/config.py` (at 26857050) has
the sizes, the length, the window and the base of rotary embedding, each with the address of the published file.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def sizes(width: int, mlp_width: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Values:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (width, mlp_width, layers, heads, kv_heads), strict=True)) | {"vocab_size": vocab}


def _llama(*of_sizes: int, **more: Any) -> Values:
    common = {"hidden_act": "silu", "initializer_range": 0.02, "pretraining_tp": 1}
    common |= {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    return (
        {"model_type": "llama", "rope_scaling": None, "tie_word_embeddings": False} | common | sizes(*of_sizes) | more
    )


def _mistral(*of_sizes: int, **more: Any) -> Values:
    common = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return {"model_type": "mistral", "max_position_embeddings": 32_768} | common | sizes(*of_sizes) | more


def _qwen(model_type: str, *of_sizes: int, **more: Any) -> Values:
    common = {"attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
    common |= {"rope_theta": 1_000_000.0, "use_sliding_window": False, "tie_word_embeddings": False}
    return {"model_type": model_type} | common | sizes(*of_sizes) | more


def _qwen3(*of_sizes: int, **more: Any) -> Values:
    window = {"max_window_layers": of_sizes[2], "sliding_window": None, "rope_scaling": None}
    return _qwen(
        "qwen3", *of_sizes, attention_bias=False, head_dim=128, max_position_embeddings=40_960, **window, **more
    )


def _gemma2(*of_sizes: int, **more: Any) -> Values:
    common = {"attention_bias": False, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    common |= {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
    common |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 10_000.0}
    common |= {"max_position_embeddings": 8192, "sliding_window": 4096, "head_dim": 256}
    return {"model_type": "gemma2"} | common | sizes(*of_sizes) | more


def _gemma3_text(*of_sizes: int, **more: Any) -> Values:
    common = {"attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    common |= {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02}
    common |= {"max_position_embeddings": 32_768, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6}
    common |= {"rope_local_base_freq": 10_000, "rope_scaling": None, "rope_theta": 1_000_000, "sliding_window": 512}
    return {"model_type": "gemma3_text"} | common | sizes(*of_sizes) | more


def _phi3(*of_sizes: int, **more: Any) -> Values:
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    common = {"auto_map": code, "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu"}
    common |= {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
    common |= {"architectures": ["Phi3ForCausalLM"], "tie_word_embeddings": False, "max_position_embeddings": 131_072}
    return {"model_type": "phi3"} | common | sizes(*of_sizes) | more


def _longrope(long_factor: list[float], short_factor: list[float]) -> Values:
    return {"long_factor": long_factor, "short_factor": short_factor, "type": "longrope"}


def _gpt_oss(layers: int, num_experts: int) -> Values:
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131_072,
        "model_type": "gpt_oss",
        "num_experts_per_tok": 4,
        "num_local_experts": num_experts,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": yarn | {"rope_type": "yarn", "truncate": False},
        "rope_theta": 150_000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    } | sizes(2880, 2880, layers, 64, 8, 201_088)


_QWEN3_MOE = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
}
_OLMO2 = {"attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 500_000}
_OLMO2 |= {"tie_word_embeddings": False}

PUBLISHED: dict[str, tuple[Values, int]] = {
    # scaleapi/llm-engine, tests of `_infer_hardware`.
    "Llama-2-7b": (
        _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096, torch_dtype="float16"), 6_738_415_616
    ),
    # A public copy of Llama-3.1-8B-Instruct's; LitGPT.
    "Llama-3.1-8B": (
        _llama(
            4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0, rope_scaling=LLAMA3_SCALING, mlp_bias=False,
            max_position_embeddings=131_072, attention_bias=False,
        ),
        8_030_261_248,
    ),
    # LitGPT; a public copy of the whole file.
    "SmolLM2-135M": (
        _llama(
            576, 1536, 30, 9, 3, 49152, rope_theta=100000, tie_word_embeddings=True, rope_interleaved=False,
            max_position_embeddings=8192, initializer_range=0.041666666666666664, is_llama_config=True,
            attention_bias=False,
        ),
        134_515_008,
    ),
    # LitGPT; a public print of the whole config.
    "Mistral-7B-v0.1": (
        _mistral(4096, 14336, 32, 32, 8, 32000, sliding_window=4096, rope_theta=10000.0), 7_241_732_096
    ),
    # NVIDIA/TensorRT-LLM, tests of Mixtral; LitGPT.
    "Mixtral-8x7B": (
        _mistral(4096, 14336, 32, 32, 8, 32000, sliding_window=None, rope_theta=1000000.0)
        | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.02},
        46_702_792_704,
    ),
    # LitGPT; a public copy of the Instruct model's, which has the length 32,768.
    "Qwen2.5-7B": (
        _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064, sliding_window=131072, max_window_layers=28)
        | {"max_position_embeddings": 131_072},
        7_615_616_512,
    ),
    # Two public copies of the whole file; LitGPT.
    "Qwen3-0.6B": (_qwen3(1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True), 596_049_920),
    # LitGPT; a public copy of the file with fewer experts and layers.
    "Qwen3-30B-A3B": (
        _qwen("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, attention_bias=False, max_window_layers=48) | _QWEN3_MOE,
        30_532_122_624,
    ),
    "gemma-2-27b": (
        _gemma2(4608, 36864, 46, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144)
        | {"sliding_window_size": 4096, "_attn_implementation": "eager"},
        27_227_128_320,
    ),
    # circuit-tracer, tests of Gemma 3 under nnsight.
    "gemma-3-270m": (
        _gemma3_text(640, 2048, 18, 4, 1, 262144, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3)
        | {"use_bidirectional_attention": False, "_sliding_window_pattern": 6}
        | {"rope_local_base_freq": 10_000.0, "rope_theta": 1_000_000.0},
        268_098_176,
    ),
    # A public copy of gemma-3-1b-it's whole file; LitGPT.
    "gemma-3-1b": (
        _gemma3_text(1152, 6912, 26, 4, 1, 262144, sliding_window_pattern=6, cache_implementation="hybrid"),
        999_885_952,
    ),
    # LitGPT.
    "OLMo-2-1124-7B": (
        {"model_type": "olmo2", "max_position_embeddings": 4096} | _OLMO2 | sizes(4096, 11008, 32, 32, 32, 100352),
        7_298_617_344,
    ),
    # mini-sglang, tests of OLMo 3; prime-rl, a probe of OLMo 3.
    "Olmo-3-1025-7B": (
        {
            "model_type": "olmo3",
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "max_position_embeddings": 65536,
            "sliding_window": 4096,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
        }
        | _OLMO2
        | sizes(4096, 11008, 32, 32, 32, 100278),
        7_298_011_136,
    ),
    # Three public tests that copy the file; none has max_window_layers or layer_types.
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        }
        | sizes(2048, 11008, 36, 16, 4, 128256),
        3_075_098_624,
    ),
    # sdpython/onnx-diagnostic, hub_data_cached_configs.py; NVIDIA/TensorRT-LLM, tests of Phi-3.
    "Phi-3-mini-4k-instruct": (
        _phi3(3072, 8192, 32, 32, 32, 32064, rope_scaling=None, max_position_embeddings=4096, sliding_window=2047),
        3_821_079_552,
    ),
    # sdpython/onnx-diagnostic, the same file. The tables are ours: what they hold changes no size.
    "Phi-3-mini-128k-instruct": (
        _phi3(
            3072, 8192, 32, 32, 32, 32064, sliding_window=262144,
            rope_scaling=_longrope([1.07] * 32 + [64.76] * 16, [1.1] * 32 + [3.05] * 16),
        ),
        3_821_079_552,
    ),
    # A public copy of the whole file.
    "Phi-4-mini-instruct": (
        _phi3(
            3072, 8192, 32, 24, 8, 200064, partial_rotary_factor=0.75, sliding_window=262144,
            tie_word_embeddings=True, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
            rope_scaling=_longrope([1.0] * 24 + [47.77] * 24, [1.0] * 48),
        ),
        3_836_021_760,
    ),
    # A public copy of the whole file; LitGPT.
    "phi-4": (
        _phi3(5120, 17920, 40, 40, 10, 100352, rope_scaling=None, max_position_embeddings=16384, rope_theta=250000)
        | {"sliding_window": None, "original_max_position_embeddings": 16384, "auto_map": {}},
        14_659_507_200,
    ),
    # jihengzhang/jihz-gpt-oss-20b, gpt-oss-20b/config.json; quantization_config of a public copy of 120b's.
    "gpt-oss-20b": (_gpt_oss(24, 32), 20_914_757_184),
}  # fmt: skip
"""By name: the file, and the parameters that its page states."""

_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

REFUSED: dict[str, tuple[Values, str]] = {
    "Qwen3-0.6B-FP8": (
        PUBLISHED["Qwen3-0.6B"][0] | {"quantization_config": _FP8},
        "quantization_config.quant_method='fp8'; expected weights that aren't quantized; take ",
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "quantization_config": _FP8,
        },
        "model_type='deepseek_v3'; expected one of llama, .*; code of the folder's own, .* is never run",
    ),
    "gpt2": ({"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768}, "model_type='gpt2'; expected one of llama, "),
    "CodeLlama with dynamic scaling": (
        _llama(4096, 11008, 32, 32, 32, 32000, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_type='dynamic'; expected one of default, .*'dynamic' changes a text's keys while it grows",
    ),
    "Qwen3-30B-A3B with layers that aren't sparse": (
        PUBLISHED["Qwen3-30B-A3B"][0] | {"mlp_only_layers": [0]},
        r"mlp_only_layers=\[0\]; expected \[\] or None",
    ),
    "embeddinggemma-300m": (
        PUBLISHED["gemma-3-270m"][0] | {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True; expected False or None",
    ),
}
"""By name: the file, and what is said of it in one line, as a regular expression."""
