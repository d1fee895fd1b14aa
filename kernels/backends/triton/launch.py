"""Starts a Triton kernel: on a GPU through jax-triton, or in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import triton
import triton.language as tl

from kernels.backends.triton.tuning import TritonTiles

_POINTEES = {"float16": tl.float16, "float32": tl.float32, "int32": tl.int32, "uint32": tl.uint32}


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    constants: dict[str, Any],
    tiles: TritonTiles,
    compute_capability: float | None,
    zeroed: tuple[int, ...] = (),
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs `kernel(*inputs, *outputs, **constants)` once for each point of a grid.

    Args:
      kernel: a `triton.jit` function of pointers, followed by constants.
      inputs, outputs: what the pointers point to.
      tiles: how many warps run a program, and how many stages of loads are in flight.
      compute_capability: of the GPU that it is compiled for; None to interpret it.
      zeroed: the outputs that must be zero to begin with.
    """
    if interpret:
        run = functools.partial(_interpret, kernel, outputs, grid, constants, zeroed)
        return jax.pure_callback(run, list(outputs), *inputs)
    # It needs JAX's GPU plugin.
    import jax_triton

    assert compute_capability is not None
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        out_shape=list(outputs),
        grid=grid,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        compute_capability=round(10 * compute_capability),
        zeroed_outputs=zeroed,
        **constants,
    )


def _interpret(kernel, outputs, grid, constants, zeroed, *inputs) -> list[np.ndarray]:
    operands = [np.ascontiguousarray(x) for x in inputs]
    results = [(np.zeros if i in zeroed else np.empty)(out.shape, out.dtype) for i, out in enumerate(outputs)]
    # Like a GPU's, an exponential of −inf or of a huge number isn't worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        kernel[grid](*map(_pointer, operands + results), **constants)
    return results


def _pointer(array: np.ndarray) -> tl.tensor:
    """What the interpreter makes of a PyTorch tensor, which it expects."""
    handle: Callable = triton.runtime.interpreter.TensorHandle
    pointer = tl.pointer_type(_POINTEES[array.dtype.name])
    return tl.tensor(handle(np.array([array.ctypes.data], np.uint64), pointer), pointer)
