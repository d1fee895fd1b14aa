"""GPTConfig: what it counts, what it refuses, what it imports."""

import dataclasses
import math
import subprocess
import sys

import pytest

from kernels import CausalMask, LocalMask, MultiHeadMask, ScheduledWindow
from layers import GPTConfig, LayerOverride, MoEConfig, RopeScaling
from layers.layer_config import LayerConfig

LONGROPE = RopeScaling("longrope", 2.0, short_factors=(1.0, 1.0), long_factors=(2.0, 3.0))


def test_default_is_gpt2_small_with_124m_parameters():
    assert GPTConfig().num_parameters == 50_304 * 768 + 12 * (4 * 768**2 + 2 * 768 * 3072 + 2 * 768) + 768
    assert round(GPTConfig().num_parameters / 1e6) == 124


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_kv_heads": 5},
            r"num_heads=12 is not a multiple of num_kv_heads=5; set num_kv_heads to one of \[1, 2, 3,",
        ),
        ({"vocab_size": 2**31}, r"model.vocab_size=2147483648 must be finite and at most 2\^31 - 1"),
        ({"rope_base": 1e39}, r"model.rope_base=1e\+39 must be finite and at most 3.4e38"),
        ({"norm_epsilon": 1e-40}, "model.norm_epsilon=1e-40 is 0 in float32"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"head_dim": 63}, "head_dim=63 is odd.*use 64, or rope_base=None"),
        ({"mlp": "relu"}, "model.mlp='relu' is not one of gelu, swiglu, geglu"),
        ({"remat": "some"}, r"model.remat='some'.* is not one of none, save_matmuls, .* nor of the form save\(NAME"),
        ({"compute_dtype": "float16"}, "model.compute_dtype='float16' is not one of float32, bfloat16"),
        ({"compute_dtype": "float64"}, "compute_dtype='float64' needs JAX's 64-bit types.*set JAX_ENABLE_X64=1"),
        ({"param_dtype": "float64"}, "param_dtype='float64' needs JAX's 64-bit types.*set JAX_ENABLE_X64=1"),
        ({"param_dtype": "int8"}, "model.param_dtype='int8' is not one of"),
        ({"masks": ()}, "model.masks is empty; give at least one"),
        ({"masks": ("CausalMask()",)}, r"model.masks holds 'CausalMask\(\)'; expected masks from kernels"),
        ({"masks": (MultiHeadMask([CausalMask()] * 3),)}, "MultiHeadMask for 3 heads, but num_heads=12"),
        ({"masks": (MultiHeadMask([CausalMask()] * 3), CausalMask())}, "MultiHeadMask for 3 heads, but num_heads=12"),
        (
            {"masks": (ScheduledWindow(1, 8, 10), ScheduledWindow(1, 9, 10))},
            "model.masks holds ScheduledWindow.*stop=8.* and .*stop=9.*; give all layers one ScheduledWindow",
        ),
        (
            {"masks": (CausalMask() | ScheduledWindow(1, 8, 10),)},
            "a ScheduledWindow combines with other masks by &",
        ),
        (
            {"implementation": "flash"},
            r"model.implementation='flash' is no backend of attention; expected one of .*blockwise.* or None",
        ),
        ({"masks": (CausalMask(),) * 13}, "13 entries for num_layers=12, so the last would never be used"),
        ({"rope_base": 1.0}, "rope_base=1.0 must be greater than 1"),
        ({"logits_soft_cap": 0.0}, "model.logits_soft_cap=0.0 must be positive; None turns it off"),
        ({"logits_soft_cap": float("nan")}, "model.logits_soft_cap=nan must be finite"),
        ({"logits_soft_cap": "30"}, "model.logits_soft_cap must be a real number, got '30'"),
        ({"norm_epsilon": 0.0}, "model.norm_epsilon=0.0 must be positive"),
        ({"qk_norm": True}, "model.qk_norm=True is not one of none, per_head, whole"),
        ({"qk_norm_after_rope": True}, "qk_norm_after_rope=True has no effect with model.qk_norm='none'; set that to"),
        ({"norm_placement": "after"}, "model.norm_placement='after' is not one of pre, post, both"),
        ({"query_scale": 0.0}, "model.query_scale=0.0 must be positive; None is the usual scale"),
        ({"embedding_scale": -1.0}, "model.embedding_scale=-1.0 must be positive"),
        ({"final_logits_soft_cap": 0.0}, "model.final_logits_soft_cap=0.0 must be positive; None turns it off"),
        ({"norm_scale_offset": math.nan}, "model.norm_scale_offset=nan must be finite"),
        ({"rope_fraction": 0.0}, "rope_fraction=0.0 must be positive and at most 1"),
        ({"rope_fraction": 0.3}, "rope_fraction=0.3 of head_dim=64 is 19 features.*use 20 / 64, or rope_base=None"),
        ({"rope_scaling": LONGROPE}, "short_factors has 2 entries, and a head 32 frequencies; give .* each of them"),
        ({"layer_overrides": ({"rope_base": None},)}, "model.layer_overrides holds {.*}; expected a LayerOverride"),
        (
            {"layer_overrides": (LayerOverride(),) * 13},
            "model.layer_overrides has 13 entries for num_layers=12, so the last would never be used; drop some",
        ),
        (
            {"layer_overrides": (LayerOverride(),) * 3, "masks": (CausalMask(),) * 2},
            "model.layer_overrides has 3 entries and model.masks 2; spell both out to one length, or give one entry",
        ),
        (
            {"layer_overrides": (LayerOverride(), LayerOverride(num_kv_heads=5))},
            "model.layer_overrides, layer 1: num_heads=12 is not a multiple of num_kv_heads=5; set num_kv_heads to",
        ),
        (
            {"layer_overrides": (LayerOverride(head_dim=7),)},
            "model.layer_overrides, layer 0: head_dim=7 is odd.*use 8, or rope_base=None",
        ),
        (
            {"moe": MoEConfig(4, 2, 64), "mlp_bias": True},
            "model.mlp_bias=True has no effect with model.moe; set model.moe.expert_bias",
        ),
    ],
)
def test_refuses_what_cannot_be_built(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GPTConfig(), **change)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (
            LayerOverride,
            {"rope_base": "none"},
            "LayerOverride.rope_base='none' must be of the model field's type, or 'm",
        ),
        (LayerOverride, {"num_kv_heads": 0}, "LayerOverride.num_kv_heads=0 must be at least 1"),
        (LayerOverride, {"rope_base": math.inf}, "LayerOverride.rope_base=inf must be finite"),
        (MoEConfig, {"num_experts": 0}, "model.moe.num_experts=0 must be at least 1"),
        (MoEConfig, {"num_experts_per_token": 5}, "num_experts_per_token=5 is more than num_experts=4; use at most"),
        (
            MoEConfig,
            {"load_balance_loss_weight": -1.0},
            "load_balance_loss_weight=-1.0 must be finite and not negative",
        ),
        (MoEConfig, {"router_z_loss_weight": math.nan}, "router_z_loss_weight=nan must be finite and not negative; 0 "),
    ],
)
def test_what_layers_are_made_of_refuses(cls, arguments, message):
    sizes = {"num_experts": 4, "num_experts_per_token": 2, "expert_width": 8} if cls is MoEConfig else {}
    with pytest.raises(ValueError, match=message):
        cls(**sizes | arguments)


def test_a_layers_own_settings():
    """Of its override where that says so, else the model's; masks and overrides repeat together."""
    yarn, window = RopeScaling("yarn", 4.0), CausalMask() & LocalMask(7, 0)
    config = GPTConfig(
        num_layers=5,
        masks=(window, CausalMask()),
        rope_base=500.0,
        layer_overrides=(LayerOverride(num_kv_heads=4, rope_fraction=0.5), LayerOverride(None, yarn, head_dim=32)),
    )
    first = LayerConfig(window, 4, 64, 500.0, RopeScaling(), 0.5)
    second = LayerConfig(CausalMask(), 12, 32, None, yarn, 1.0)
    assert [config.layer(index) for index in range(5)] == [first, second, first, second, first]
    assert config.layer_counts == {first: 3, second: 2}
    serves_all = dataclasses.replace(config, layer_overrides=(LayerOverride(num_kv_heads=6),))
    assert [(serves_all.layer(index).mask, serves_all.layer(index).num_kv_heads) for index in (0, 1)] == [
        (window, 6),
        (CausalMask(), 6),
    ]


def test_odd_head_dim_is_fine_without_rotary_embedding():
    assert GPTConfig(head_dim=63, rope_base=None).head_dim == 63


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "yarm"}, "rope_scaling.kind='yarm' is not one of none, linear, ntk, llama3, yarn, longrope"),
        ({"kind": "linear", "factor": 0.5}, "rope_scaling.factor=0.5 must be finite and at least 1"),
        ({"kind": "linear", "factor": float("inf")}, "rope_scaling.factor=inf must be finite"),
        ({"factor": 8.0}, "rope_scaling.factor=8.0 has no effect with rope_scaling.kind='none'; set the kind"),
        (
            {"kind": "llama3", "factor": 8.0, "low_frequency_factor": 4.0},
            "low_frequency_factor=4.0 must be positive and less",
        ),
        (
            {"kind": "yarn", "factor": 8.0, "beta_slow": 32.0},
            "beta_slow=32.0 must be positive and less than beta_fast=32",
        ),
        ({"kind": "yarn", "factor": 8.0, "attention_factor": 0.0}, "attention_factor=0.0 must be positive and finite"),
        (
            {"kind": "linear", "factor": 8.0, "attention_factor": 1.1},
            "attention_factor=1.1 has no effect with rope_scaling.kind='linear'; set the kind to yarn or longrope, or",
        ),
        ({"kind": "yarn", "short_factors": (1.0,)}, "short_factors=.* has no effect .* set the kind to longrope"),
        ({"kind": "longrope"}, "short_factors has 0 entries .*; longrope needs one in each for every frequency"),
        (
            {"kind": "longrope", "short_factors": (1.0, 2.0), "long_factors": (1.0,)},
            "long_factors has 1 entries and short_factors 2; longrope needs one in each",
        ),
        (
            {"kind": "longrope", "short_factors": (1.0, 0.0), "long_factors": (1.0, 2.0)},
            r"short_factors=\(1.0, 0.0\) must all be positive and finite",
        ),
        (
            {"kind": "longrope", "short_factors": (1.0,), "long_factors": (1.0,), "original_context_length": 1},
            "original_context_length=1 gives longrope no attention_factor; set that",
        ),
        (
            {"kind": "llama3", "factor": 8.0, "original_context_length": 0},
            "original_context_length=0 must be at least 1",
        ),
    ],
)
def test_rope_scaling_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)


def test_factors_of_longrope_may_be_lists():
    listed = RopeScaling("longrope", 2.0, short_factors=[1.0, 2.0], long_factors=[2.0, 3.0])
    assert hash(listed) == hash(RopeScaling("longrope", 2.0, short_factors=(1.0, 2.0), long_factors=(2.0, 3.0)))


def test_config_is_hashable_and_needs_neither_flax_nor_a_device():
    program = (
        "import sys; from layers import GPTConfig; hash(GPTConfig()); assert 'flax' not in sys.modules; "
        "import jax; assert not jax._src.xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_unknown_name_in_package():
    import layers

    with pytest.raises(AttributeError, match="module 'layers' has no attribute 'Attenton'"):
        _ = layers.Attenton
    assert all(getattr(layers, name) is not None for name in layers.__all__)
