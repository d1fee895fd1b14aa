"""Random config.json files of a family, drawn over every key that transformers' class of it knows.

A key that a new version of transformers adds is drawn by the type of its default. Keys of other families and of older
files come in, too: transformers keeps what it doesn't know, and some of its code asks for it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator
Draw = Callable[[Rng, dict[str, Any]], Any]

# What makes a model small; the rest may be absent.
_SIZES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (40, 33),
    "hidden_size": (32, 48),
    "intermediate_size": (16, 24),
    "num_hidden_layers": (2, 3, 4),
    "num_attention_heads": (4, 8),
    "pad_token_id": (None, 0, 3),
    "max_position_embeddings": (8, 24, 64, 512),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (None, 1, 2, 2, 4, 4),
    "head_dim": (None, 4, 6, 8),
    "hidden_act": (*("silu",) * 8, "swish", "gelu"),
    "hidden_activation": (*("gelu_pytorch_tanh",) * 9, None, "gelu", "silu"),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2),
    "sliding_window": (None, 1, 4, 8, 100),
    "max_window_layers": (0, 1, 2, 28, None),
    "sliding_window_pattern": (1, 2, 3, 6),
    "no_rope_layer_interval": (1, 2, 3),
    "rope_theta": (100.0, 10000, 500000.0),
    "rope_local_base_freq": (100.0, 10000.0),
    "partial_rotary_factor": (None, 0.5, 1.0),
    "original_max_position_embeddings": (None, 8, 16, 4096),
    "query_pre_attn_scalar": (1, 8, 144),
    "attn_logit_softcapping": (None, 1.0, 50.0),
    "final_logit_softcapping": (None, 1.0, 30.0),
    "num_local_experts": (2, 4),
    "num_experts": (2, 4),
    "num_experts_per_tok": (1, 1, 2),
    "moe_intermediate_size": (6, 8),
    "decoder_sparse_step": (1, 1, 1, 2),
    "mlp_only_layers": ([], None, [0]),
    "swiglu_alpha": (1.702, 1.702, 1.5),
    "swiglu_limit": (7.0, 7.0, 1.0),
    "use_bidirectional_attention": (None, False, False, True),
    "is_causal": (True, False),
    "quantization_config": (None, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "auto_map": ({"AutoConfig": "configuration_x.X"},),
    "router_jitter_noise": (0.0, 0.1),
    "bos_token_id": (None, 1),
    "eos_token_id": (None, 2, [2, 3]),
    "attention_chunk_size": (None, 4),
    "attention_multiplier": (None, 0.5),
}
# What transformers' callers get back, not what is computed.
_OUTPUTS = {"return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder", "torchscript"}
# Keys of older files, which no class names.
_OLDER = ("partial_rotary_factor", "rope_local_base_freq", "sliding_window_pattern", "original_max_position_embeddings")
_LAYERS = ("full_attention", "sliding_attention")


def draw(rng: Rng, config_class: type, others: tuple[type, ...] = ()) -> dict[str, Any]:
    """A config.json's values, most of them with keys of the class alone.

    Args:
      rng: of NumPy.
      config_class: transformers'.
      others: classes whose keys come in now and then.
    """
    own = {name: default for name, default in _keys(config_class).items() if name not in _OUTPUTS}
    values: dict[str, Any] = {"model_type": config_class.model_type, "architectures": ["X"]}
    experts = {name: _CHOICES[name] for name in own if "expert" in name and name in _CHOICES}
    values |= {name: choices[rng.integers(len(choices))] for name, choices in (_SIZES | experts).items()}
    foreign = {name: default for other in others for name, default in _keys(other).items() if name not in _OUTPUTS}
    foreign |= dict.fromkeys(("is_causal", "layer_types", "auto_map", "quantization_config", "rope_scaling"), None)
    likelihood = dict.fromkeys(own, 0.4) | {name: 0.02 for name in foreign if name not in own}
    # Most of the ways to be refused hide how the other keys are read.
    likelihood |= dict.fromkeys(("is_causal", "quantization_config", "per_layer_config"), 0.02)
    likelihood |= dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), 0.25)
    likelihood |= dict.fromkeys(_OLDER, 0.15) | {"layer_types": 0.3}
    if "rope_parameters" not in own:  # which transformers 4 doesn't look at
        del likelihood["rope_parameters"]
    for name in rng.permutation(sorted(likelihood)).tolist():
        if name not in values and rng.random() < likelihood[name]:
            values[name] = _value(rng, name, (own | foreign).get(name), values)
    heads = own["num_key_value_heads"]
    if "num_key_value_heads" not in values and heads is not None and values["num_attention_heads"] % heads:
        values |= {"num_attention_heads": heads, "hidden_size": 4 * heads}
    return values


def _keys(config_class: type) -> dict[str, Any]:
    """The keys of a class, with their defaults: from transformers 5 on it is a dataclass."""
    if dataclasses.is_dataclass(config_class):
        fields = dataclasses.fields(config_class)
        return {field.name: None if field.default is dataclasses.MISSING else field.default for field in fields}
    found = {}
    for each in reversed(config_class.__mro__):
        if "__init__" in vars(each):
            parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
            found |= {
                one.name: one.default
                for one in parameters
                if one.name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD
            }
    return found


def _value(rng: Rng, name: str, default: Any, values: dict[str, Any]) -> Any:
    num_layers = values["num_hidden_layers"]
    if name == "layer_types":
        return [_LAYERS[rng.integers(2)] for _ in range(num_layers)]
    if name == "no_rope_layers":
        return rng.integers(0, 2, num_layers).tolist()
    if name in ("rope_scaling", "rope_parameters"):
        return _rope(rng, values, nested=name == "rope_parameters")
    if name in _CHOICES:
        choices = _CHOICES[name]
        return choices[rng.integers(len(choices))]
    if isinstance(default, bool):
        return bool(rng.integers(2))
    if isinstance(default, int | float):
        return type(default)(rng.choice([0, default, 2 * default]))
    return default if isinstance(default, str) else None


def _rope(rng: Rng, values: dict[str, Any], *, nested: bool) -> dict[str, Any] | None:
    if rng.random() < 0.1:
        return None
    if nested and rng.random() < 0.4:
        return {kind: _rope(rng, values, nested=False) for kind in _LAYERS}
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    kind = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")[
        rng.choice(6, p=(0.2, 0.2, 0.2, 0.2, 0.15, 0.05))
    ]
    tables = {name: (1 + 3 * rng.random(head_dim // 2)).tolist() for name in ("short_factor", "long_factor")}
    of_kind: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, **(tables if rng.random() < 0.2 else {})},
        "longrope": tables | {"factor": 4.0, "original_max_position_embeddings": 16},
    }  # fmt: skip
    more: dict[str, Any] = {
        "rope_theta": 1000.0,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "partial_rotary_factor": 0.5,
    }
    drawn = {name: value for name, value in of_kind.get(kind, {}).items() if rng.random() < 0.95}
    drawn |= {name: value for name, value in more.items() if rng.random() < 0.2}
    name = "rope_type" if rng.random() < 0.7 else "type"
    return drawn | {name: {"longrope": "su"}.get(kind, kind) if name == "type" and rng.random() < 0.3 else kind}


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """A published config.json with every size made small, and all the other keys as they are."""
    num_layers, ratio = 8, values["num_attention_heads"] // values["num_key_value_heads"]
    heads = max(4, ratio) if ratio % 2 == 0 or ratio == 1 else 2 * ratio
    small: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 8 * heads,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // ratio,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 16,
        "sliding_window": 6,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    shorter = {name: size for name, size in small.items() if values.get(name) is not None}
    shorter |= {name: values[name][:num_layers] for name in ("layer_types", "no_rope_layers") if name in values}
    # Those that a tokenizer gives are past the small vocabulary.
    shorter |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if scaling := values.get("rope_scaling"):
        num_frequencies = int(8 * values.get("partial_rotary_factor", 1)) // 2
        ends = {name: scaling[name][-num_frequencies:] for name in ("short_factor", "long_factor") if name in scaling}
        length = {"original_max_position_embeddings": 16} if "original_max_position_embeddings" in scaling else {}
        shorter["rope_scaling"] = scaling | ends | length
    return values | shorter
