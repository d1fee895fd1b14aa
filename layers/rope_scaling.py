"""How rotary frequencies are changed for a longer context, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from layers.checks import check_choice, check_numbers

RopeScalingKind = Literal["none", "linear", "ntk", "llama3", "yarn", "longrope"]

_KINDS_OF_FIELD = {
    "attention_factor": ("yarn", "longrope"),
    "short_factors": ("longrope",),
    "long_factors": ("longrope",),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed to serve positions past those trained on."""

    kind: RopeScalingKind = "none"
    """linear: position interpolation (arXiv:2306.15595); ntk: NTK-aware base change (arXiv:2309.00071);
    llama3: low frequencies only (arXiv:2407.21783); yarn: low frequencies, and sharper attention (arXiv:2309.00071);
    longrope: a factor for each frequency, from a table (arXiv:2402.13753)."""
    factor: float = 1.0
    """How many times longer the context becomes."""
    low_frequency_factor: float = 1.0
    """llama3: frequencies with fewer than this many turns in the original context are divided by `factor`."""
    high_frequency_factor: float = 4.0
    """llama3: frequencies with more than this many turns in the original context stay as they are."""
    original_context_length: int = 8192
    """llama3, yarn, longrope: the context length, in tokens, before scaling."""
    beta_fast: float = 32.0
    """yarn: frequencies with more than this many turns in the original context stay as they are."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer than this many turns in the original context are divided by `factor`."""
    truncate: bool = True
    """yarn: round the ends of the range between the two to whole frequencies (gpt-oss doesn't)."""
    attention_factor: float | None = None
    """yarn, longrope: factor on turned queries, and on turned keys. None: 0.1 ln(factor) + 1 for yarn,
    sqrt(1 + ln(factor) / ln(original_context_length)) for longrope."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency in sequences of up to `original_context_length` tokens, fastest first. The
    length of the sequence counts, not that of the documents packed into it."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same in longer sequences."""

    def __post_init__(self):
        check_choice("rope_scaling.kind", self.kind, RopeScalingKind)
        for name in ("short_factors", "long_factors"):
            if isinstance(factors := getattr(self, name), list):  # which can't be hashed
                object.__setattr__(self, name, tuple(factors))
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"rope_scaling.factor={self.factor} must be finite and at least 1 (1 changes nothing)")
        if self.kind == "none" and self.factor != 1.0:
            raise ValueError(
                f"rope_scaling.factor={self.factor} has no effect with rope_scaling.kind='none'; "
                "set the kind to linear, ntk, llama3 or yarn"
            )
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            if not 0.0 < getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"rope_scaling.{low}={getattr(self, low)} must be positive and less than "
                    f"{high}={getattr(self, high)}"
                )
        if self.original_context_length < 1:
            raise ValueError(f"rope_scaling.original_context_length={self.original_context_length} must be at least 1")
        for field in fields(self):
            kinds, value = _KINDS_OF_FIELD.get(field.name), getattr(self, field.name)
            if kinds is not None and self.kind not in kinds and value != field.default:
                raise ValueError(
                    f"rope_scaling.{field.name}={value} has no effect with rope_scaling.kind={self.kind!r}; "
                    f"set the kind to {' or '.join(kinds)}, or leave it out"
                )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"rope_scaling.attention_factor={self.attention_factor} must be positive and finite")
        self._check_tables()
        check_numbers(self, "rope_scaling.")

    def _check_tables(self) -> None:
        if self.kind != "longrope":
            return
        if self.attention_factor is None and self.original_context_length < 2:
            raise ValueError("rope_scaling.original_context_length=1 gives longrope no attention_factor; set that")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not factors or len(factors) != len(self.short_factors):
                raise ValueError(
                    f"rope_scaling.{name} has {len(factors)} entries and short_factors {len(self.short_factors)}; "
                    "longrope needs one in each for every frequency"
                )
            if not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f"rope_scaling.{name}={factors} must all be positive and finite")

    def check_rotary_dim(self, num_features: int) -> None:
        """Checks that longrope's tables are of as many frequencies as heads have.

        Args:
          num_features: features of a head that are turned.

        Raises:
          ValueError: they aren't.
        """
        if self.kind == "longrope" and len(self.short_factors) != num_features // 2:
            raise ValueError(
                f"rope_scaling.short_factors has {len(self.short_factors)} entries, and a head {num_features // 2} "
                f"frequencies; give short_factors and long_factors one entry for each of them"
            )
