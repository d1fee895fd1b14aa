"""Compiles a program's Mosaic GPU kernels side by side, ahead of the program.

XLA compiles the kernels of a program one after another. It keeps them by their bytes for the whole process, whatever
program they are of and whichever thread compiles it (seen in jaxlib 0.11.2). So the program finds its kernels there if
programs of one kernel each were compiled before, in threads of their own.

No thread lowers a kernel here: see `kernels.hopper.begin_kernel`.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

PROGRAM_NAME = "mosaic_gpu_kernel"
"""Of the programs of one kernel each."""
CALL_TARGET = "mosaic_gpu_v2"
"""The name of a Mosaic GPU kernel's custom call in HLO."""


def compile_kernels(lowered: jax.stages.Lowered, device: jax.Device) -> None:
    """Compiles the distinct kernels of a program, where it has several.

    Args:
      lowered: the program, for GPUs.
      device: one of its devices.
    """
    kernels = find_kernels(lowered)
    if len(kernels) > 1:
        with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as executor:
            for _ in executor.map(functools.partial(_compile, device), kernels):
                pass


def find_kernels(lowered: jax.stages.Lowered) -> list[dict[str, Any]]:
    """The attributes of the program's distinct kernels, but those that other devices take part in."""
    kernels: dict[bytes, dict[str, Any]] = {}

    def visit(operation: Any) -> ir.WalkResult:  # jaxlib's stubs lack what attributes hold
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == CALL_TARGET:
            config = operation.attributes["mhlo.backend_config"]
            attributes = {entry.name: _python_value(entry.attr) for entry in config}
            if not attributes.get("uses_xla_collective_metadata"):
                kernels[attributes["kernel_hash"]] = attributes
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return list(kernels.values())


def _python_value(attribute: Any) -> Any:
    return attribute.value_bytes if isinstance(attribute, ir.StringAttr) else attribute.value


def _compile(device: jax.Device, attributes: dict[str, Any]) -> None:
    """Compiles a kernel as a program of its own, which is never run. No operand is needed for that."""

    def kernel() -> jax.Array:
        return jax.ffi.ffi_call(CALL_TARGET, jax.ShapeDtypeStruct((), jnp.int32))(**attributes)

    kernel.__name__ = PROGRAM_NAME
    jax.jit(kernel, out_shardings=jax.sharding.SingleDeviceSharding(device)).lower().compile()
