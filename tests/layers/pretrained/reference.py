"""Tiny random models of each family, made and run by transformers 4.57 or 5; needs torch, too.

Each of them has what its family has of its own: windows that prompts outgrow, rotary scaling that they outgrow too,
layers that differ.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 8
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}

# Name, class of the config, settings on top of SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_with_biases": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 10}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "rope_parameters": YARN},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": {**YARN, "factor": 2.5}}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"intermediate_size": 6, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 3,
            "head_dim": 10,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 10,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
    ),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": YARN,
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "phi3": (
        "Phi3Config",
        {
            "num_attention_heads": 2,
            "hidden_size": 24,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.25, 1.5],
                "long_factor": [1.0, 3.0, 7.5],
            },
        },
    ),
    "phi3_with_window": ("Phi3Config", {"sliding_window": WINDOW}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 10,
            "sliding_window": WINDOW,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "intermediate_size": 8,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
}


_IS_VERSION_4 = transformers.__version__.startswith("4.")


def _settings_of(case: str) -> dict[str, Any]:
    """A case's settings for this version of transformers: before 5 there are other keys for rotary embedding."""
    settings = SIZES | CASES[case][1]
    if not _IS_VERSION_4 or "rope_parameters" not in settings:
        return settings
    parameters = settings.pop("rope_parameters")
    if "full_attention" in parameters:
        if case.startswith("gemma"):
            settings["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    scaling = dict(parameters)
    settings["rope_theta"] = scaling.pop("rope_theta")
    if case == "olmo3":
        settings["rope_theta"] = 500_000.0  # transformers 5 finds no other for layers with windows
    if "partial_rotary_factor" in scaling:
        settings["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if "long_factor" in scaling:
        scaling["type"] = scaling.pop("rope_type")  # Phi-3 has it under the name from before `rope_type`
    return settings | {"rope_scaling": scaling}


@contextlib.contextmanager
def float64_everywhere() -> Iterator[None]:
    """transformers' models in float64 throughout.

    They compute norms, rotary angles, softmax and routing in float32 whatever the weights' type is, by the names
    `torch.float32`, `torch.float` and `Tensor.float`. Here those names mean float64.
    """
    saved = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved[:3]
        torch.set_default_dtype(saved[3])


def save_random_model(case: str, folder: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Makes a model of a case, and lets transformers save it."""
    config = getattr(transformers, CASES[case][0])(**_settings_of(case))
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, torch.Generator().manual_seed(seed), is_gemma=case.startswith("gemma"))
    model.to(dtype).save_pretrained(folder)


def randomize(model: Any, generator: torch.Generator, *, is_gemma: bool) -> None:
    """Gives a model weights that leave nothing without effect."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = 0.3 * values + (0.0 if is_gemma else 1.0)
            elif parameter.ndim > 1 and "embed" not in name and "bias" not in name:
                values = 1.5 * values / math.sqrt(parameter.shape[-1])
            parameter.copy_(values)


def load_reference(folder: Path) -> Any:
    """A folder's model in float64; to be run within `float64_everywhere`."""
    eager = {"attn_implementation": "eager"} | ({} if _IS_VERSION_4 else {"experts_implementation": "eager"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager).eval()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of all positions, of each row by itself."""
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def greedy_tokens(model: Any, prompt: np.ndarray, num_tokens: int) -> np.ndarray:
    """Tokens that `generate` adds to a prompt when it always takes the likeliest token."""
    inputs = torch.tensor(prompt[None], dtype=torch.long)
    outputs = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        do_sample=False,
    )  # fmt: skip
    return outputs[0, len(prompt) :].numpy()
