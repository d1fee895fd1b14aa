"""The numbers of a call that are compiled into its kernels: the scale and the soft cap of the logits."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_LARGEST_CAP = 1e30


def checked_scale(scale: Any, name: str = "scale") -> float | None:
    """The factor on the logits as a Python number that float32 holds, or None; errors call it by its `name`.

    It may be negative or 0.
    """
    return _static_number(name, scale, "None stands for 1/√head_dim", "multiply query by it and pass scale=1.0")


def checked_soft_cap(cap: Any, name: str = "logits_soft_cap") -> float | None:
    """The soft cap as a positive Python number that float32 holds, or None; errors call it by its `name`."""
    number = _static_number(name, cap, "None turns it off", "use one that is known ahead of time")
    if number is not None and number <= 0:
        raise ValueError(f"{name}={number} must be positive; None turns it off")
    if number is not None and number > _LARGEST_CAP:
        # Logits divided by it would be too small for float32, and all become 0.
        raise ValueError(f"{name}={number} must be at most {_LARGEST_CAP:.0e}: so large a cap bounds nothing; use None")
    return number


def _static_number(name: str, value: Any, default: str, instead: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is traced ({value.aval.str_short()}), but it must be a Python number, since it is compiled into "
            f"the kernels; make it a static argument of jax.jit (static_argnames={name.split('.')[-1]!r}), or {instead}"
        )
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        is_real = value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    else:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real:
        raise ValueError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}; {default}")
    try:
        number = float(value)
    except OverflowError:  # an integer past all floats
        number = math.inf
    if number and not _SMALLEST <= abs(number) <= _LARGEST:
        raise ValueError(
            f"{name}={number} must be finite and in float32's range (0, or from {_SMALLEST:.4g} to {_LARGEST:.4g} in "
            f"size); {default}"
        )
    return number
