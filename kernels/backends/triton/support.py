"""The calls that the Triton kernels refuse."""

from __future__ import annotations

import importlib.util
import os

import jax.numpy as jnp
import numpy as np

from kernels.backends import Call
from kernels.backends.triton.tuning import TritonTuning, shared_memory_excess
from kernels.call import AttentionCall

_OLDEST_CAPABILITY = 8.0
_MAX_HEAD_DIM = 256


def unsupported_reason(call: AttentionCall, tuning: TritonTuning | None = None) -> str | None:
    """Why the kernels can't serve the call, or None if they can."""
    interpreted = tuning is not None and tuning.interpret
    reason = reason_in_call(call, interpreted=interpreted)
    if reason is not None or interpreted or tuning is None:
        return reason
    return shared_memory_excess(call, tuning)


def reason_in_call(call: Call, *, interpreted: bool) -> str | None:
    """Why no tuning serves a call of attention or of decoding."""
    capability = call.target.compute_capability
    if not interpreted:
        if capability is None:
            return f"needs an NVIDIA GPU, not {call.target.device_kind}"
        if capability < _OLDEST_CAPABILITY:
            return f"needs an NVIDIA GPU of compute capability {_OLDEST_CAPABILITY}, this one has {capability}"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {call.dtype}"
    widest = max(call.head_dim, call.value_dim)
    if widest > _MAX_HEAD_DIM:
        return f"takes head dims up to {_MAX_HEAD_DIM}, not {widest}"
    for mask in call.mask.distinct_heads(call.num_heads):
        if not mask.has_row_intervals:
            return f"needs masks that allow each query one interval of keys, known in closed form, not {mask!r}"
    if call.scale <= 0:
        return f"takes positive scales, not {call.scale}"
    return _interpreter_missing(call.dtype) if interpreted else _compiler_missing()


def _compiler_missing() -> str | None:
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"needs {package}, which isn't installed; pip install -e '.[cuda13]' in the clone"
    return None


def _interpreter_missing(dtype: np.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which isn't installed; pip install -e '.[dev]' in the clone"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "interprets its kernels only if TRITON_INTERPRET=1 was set before Triton's first import"
    if dtype == jnp.bfloat16:
        return "can't be interpreted in bfloat16, which Triton's interpreter multiplies as integers; use float16"
    return None
