"""GPTConfig: what it counts, what it refuses, what it imports."""

import dataclasses
import subprocess
import sys

import pytest

from kernels import CausalMask, MultiHeadMask
from layers import GPTConfig, RopeScaling
from layers.checks import check_numbers


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
            {"implementation": "flash"},
            r"model.implementation='flash' is no backend of attention; expected one of .*blockwise.* or None",
        ),
        ({"masks": (CausalMask(),) * 13}, "13 entries for num_layers=12, so the last would never be used"),
        ({"rope_base": 1.0}, "rope_base=1.0 must be greater than 1"),
        ({"logits_soft_cap": 0.0}, "model.logits_soft_cap=0.0 must be positive; None turns it off"),
        ({"logits_soft_cap": float("nan")}, "model.logits_soft_cap=nan must be finite"),
        ({"logits_soft_cap": "30"}, "model.logits_soft_cap must be a real number, got '30'"),
        ({"norm_epsilon": 0.0}, "model.norm_epsilon=0.0 must be positive"),
    ],
)
def test_refuses_what_cannot_be_built(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GPTConfig(), **change)


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
            {"kind": "llama3", "factor": 8.0, "original_context_length": 0},
            "original_context_length=0 must be at least 1",
        ),
    ],
)
def test_rope_scaling_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)


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


Share = float


@dataclasses.dataclass(frozen=True)
class Settings:
    """A config class whose annotations are types, an alias among them, not the strings that this project's are."""

    share: Share = 0.5
    most: int | None = None

    def __post_init__(self):
        check_numbers(self, "settings.")


@dataclasses.dataclass(frozen=True)
class NamedSettings:
    """The same in strings that hold no type's name."""

    share: "Share" = 0.5

    def __post_init__(self):
        check_numbers(self, "settings.")


@pytest.mark.parametrize("settings", [Settings, NamedSettings])
def test_numbers_are_checked_by_the_type_that_an_annotation_stands_for(settings):
    assert settings(share=1e30).share == 1e30
    with pytest.raises(ValueError, match=r"settings\.share=1e\+39 must be finite and at most 3.4e38"):
        settings(share=1e39)
    with pytest.raises(ValueError, match=r"settings\.most=2147483648 must be finite and at most 2\^31 - 1"):
        Settings(most=2**31)
