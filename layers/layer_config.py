"""Settings of single layers of a GPT, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels import Mask
from layers.checks import check_heads, check_numbers, rotary_dim
from layers.rope_scaling import RopeScaling

AsModel = Literal["model"]


@dataclass(frozen=True)
class LayerOverride:
    """Settings of a layer that override the model's; "model": the model's own setting."""

    rope_base: float | AsModel | None = "model"
    """As `GPTConfig.rope_base`; None: no rotary embedding in this layer (NoPE, arXiv:2501.18795)."""
    rope_scaling: RopeScaling | AsModel = "model"
    """As `GPTConfig.rope_scaling`."""
    rope_fraction: float | AsModel = "model"
    """As `GPTConfig.rope_fraction`."""
    num_kv_heads: int | AsModel = "model"
    """As `GPTConfig.num_kv_heads`."""
    head_dim: int | AsModel = "model"
    """As `GPTConfig.head_dim`."""

    def __post_init__(self):
        for name in ("rope_base", "rope_scaling", "rope_fraction", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "model":
                raise ValueError(f"LayerOverride.{name}={value!r} must be of the model field's type, or 'model'")
        for name in ("num_kv_heads", "head_dim"):
            if (value := getattr(self, name)) != "model" and value < 1:
                raise ValueError(f"LayerOverride.{name}={value} must be at least 1")
        check_numbers(self, "LayerOverride.")


@dataclass(frozen=True)
class LayerConfig:
    """One layer's own settings, resolved; all others are the model's. Fields are as in `GPTConfig`."""

    mask: Mask
    num_kv_heads: int
    head_dim: int
    rope_base: float | None
    rope_scaling: RopeScaling
    rope_fraction: float

    def check(self, num_heads: int) -> None:
        """Raises ValueError if these settings cannot make an attention layer of `num_heads` query heads."""
        check_heads(num_heads, self.num_kv_heads, self.head_dim, self.rope_base, self.rope_fraction)
        if self.rope_base is not None:
            self.rope_scaling.check_rotary_dim(rotary_dim(self.head_dim, self.rope_fraction))
