"""Number types that hold whatever a program sets for JAX: `jax_enable_x64`, `jax_numpy_dtype_promotion`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.typing import DTypeLike


@contextlib.contextmanager
def types_of_32_bits() -> Iterator[None]:
    """Traces kernels with JAX's default types: Python's numbers have 32 bits, and mixed types are promoted.

    Under `jax_enable_x64` a kernel's indices would be int64, where its grid, barriers and scalar memory have int32.
    JAX's own kernels mix types, which `jax_numpy_dtype_promotion="strict"` forbids.
    """
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """The type for sums and functions of such numbers: float32, or float64 for float64.

    `jnp.promote_types` refuses to answer under `jax_numpy_dtype_promotion="strict"`.
    """
    return np.promote_types(dtype, np.float32)
