"""Checks that the config classes and the layers share. Each raises ValueError with one readable sentence."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

from kernels import Tuning
from kernels.backends import Task, find_backend

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 2.0**128 - 2.0**104
_FLOAT32_SMALLEST = 2.0**-126  # devices take smaller ones for 0


def check_implementation(implementation: str | Tuning | None, task: Task, argument: str) -> None:
    """Raises ValueError if there is no such backend."""
    if implementation is not None:
        find_backend(implementation, task, argument)


def check_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, rope_base: float | None, rope_fraction: float = 1.0
) -> None:
    """Raises ValueError if these head counts and sizes cannot make an attention layer."""
    for name, size in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if num_heads % num_kv_heads:
        small = [n for n in range(1, math.isqrt(num_heads) + 1) if num_heads % n == 0]
        divisors = sorted({*small, *(num_heads // n for n in small)})
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; "
            f"set num_kv_heads to one of {divisors}"
        )
    if rope_base is None:
        return
    if not 0 < rope_fraction <= 1:
        raise ValueError(f"rope_fraction={rope_fraction} must be positive and at most 1, all of a head's features")
    if rope_fraction == 1 and head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} is odd, and rotary embedding turns pairs of features; "
            f"use {head_dim + 1}, or rope_base=None for no rotary embedding"
        )
    if (turned := rotary_dim(head_dim, rope_fraction)) % 2 or not turned:
        raise ValueError(
            f"rope_fraction={rope_fraction} of head_dim={head_dim} is {turned} features, and rotary embedding turns "
            f"pairs of them; use {(turned + 2) // 2 * 2} / {head_dim}, or rope_base=None for no rotary embedding"
        )
    if not rope_base > 1:
        raise ValueError(
            f"rope_base={rope_base} must be greater than 1 (10,000 is usual); None turns rotary embedding off"
        )


def rotary_dim(head_dim: int, rope_fraction: float) -> int:
    """Features of a head that rotary embedding turns; rounded down, as Hugging Face has it."""
    return int(head_dim * rope_fraction)


def check_numbers(config: object, section: str = "") -> None:
    """Checks that a device can hold the numbers of a config class: integers are int32 there, and the rest float32.

    Raises:
      ValueError: a number is NaN or infinite, or lies outside of its type.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, is_float = getattr(config, name), float in (hint, *get_args(hint))
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not abs(value) <= (_FLOAT32_MAX if is_float else _INT32_MAX):  # NaN compares as False
            raise ValueError(
                f"{section}{name}={value} must be finite and at most "
                + ("3.4e38, the most that float32 holds" if is_float else f"2^31 - 1 = {_INT32_MAX:,}")
            )
        if 0 < abs(value) < _FLOAT32_SMALLEST:
            raise ValueError(f"{section}{name}={value} is 0 in float32, whose smallest number is 1.2e-38")


def check_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError if the value isn't one of a Literal's."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
