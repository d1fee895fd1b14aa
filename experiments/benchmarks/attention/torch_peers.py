"""PyTorch's attentions as contenders, where PyTorch is installed: `torch_flash`, `torch_cudnn` and `torch_flex`.

PyTorch and JAX share the GPU's memory: run with `XLA_PYTHON_CLIENT_PREALLOCATE=false`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmarks.attention.cases import Direction, Problem
from experiments.benchmarks.attention.timing import AttentionContender


def compile_torch(
    problem: Problem, backend: str, direction: Direction, calls_per_program: int = 1
) -> AttentionContender:
    """Compiles one of TORCH_PEERS; its inputs, of the problem's shapes, are drawn afresh.

    Several calls are a loop in Python, which starts each of them as it would in PyTorch's own eager mode.

    Raises:
      ImportError: PyTorch isn't installed.
      ValueError: no GPU, or a mask that it isn't written for.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("runs on gpu, and PyTorch sees none")

    if problem.case.has_sinks:
        raise ValueError("is called without attention sinks here")

    def normal(name: str):
        batch, length, num_heads, head_dim = problem.arrays[name].shape
        shape, dtype = (batch, num_heads, length, head_dim), getattr(torch, problem.case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)

    begin = time.perf_counter()
    num_heads, num_kv_heads = problem.case.num_heads, problem.case.num_kv_heads
    attend = functools.partial(TORCH_PEERS[backend](problem), enable_gqa=num_heads != num_kv_heads)

    def call(query, key, value, d_output):
        if direction == "forward":
            with torch.no_grad():
                return attend(query, key, value)
        return torch.autograd.grad(attend(query, key, value), (query, key, value), d_output)

    inputs = [tuple(map(normal, ("query", "key", "value", "d_output"))) for _ in range(calls_per_program)]
    call(*inputs[0])
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    return AttentionContender(
        backend,
        lambda: [call(*arrays) for arrays in inputs],
        lambda _: torch.cuda.synchronize(),
        problem.length,
        compile_s,
        None,
        calls_per_program=calls_per_program,
    )


def _scaled_dot_product(backend: str, problem: Problem) -> Callable[..., Any]:
    """A backend of `torch.nn.functional.scaled_dot_product_attention`, by its name in `SDPBackend`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    window = problem.case.mask.window
    has_tokens = problem.segment_ids is not None or problem.bounds is not None
    if has_tokens or window not in ((None, None), (None, 0)):
        raise ValueError(f"has full and causal masks of one document only, not {problem.case.mask!r}")

    def attend(*inputs, enable_gqa: bool):
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=window == (None, 0), enable_gqa=enable_gqa
            )

    return attend


def _flex(problem: Problem) -> Callable[..., Any]:
    """FlexAttention with a block mask of the problem's mask and documents."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = problem.case
    num_queries, num_keys = problem.length, case.num_keys(problem.length)
    if case.mask.window is None:
        raise ValueError(f"is written for masks of distances here, not {case.mask!r}")
    left, right = (max(num_queries, num_keys) if side is None else side for side in case.mask.window)
    ids = None if problem.segment_ids is None else torch.tensor(np.array(problem.segment_ids), device="cuda")
    bounds = {} if problem.bounds is None else {name: getattr(problem.bounds, name) for name in problem.bounds.given}
    limits = {name: torch.tensor(np.array(bound), device="cuda") for name, bound in bounds.items()}

    def allowed(b, h, q, kv):
        inside = (kv - q <= right) & (q - kv <= left)
        for name, limit in limits.items():
            index, own = (kv, q) if name.startswith("k") else (q, kv)
            inside = inside & (index >= limit[own] if name.endswith("start") else index < limit[own])
        return inside if ids is None else inside & (ids[b, q] == ids[b, kv])

    # Importing jax-triton empties it for the whole process (jax_triton/triton_lib.py), and PyTorch then can't compile.
    if not os.environ.get("TRITON_CACHE_DIR", "unset"):
        del os.environ["TRITON_CACHE_DIR"]
    # Otherwise the cases that came before make it compile for shapes in general, which is slower.
    torch._dynamo.reset()
    blocks = create_block_mask(allowed, case.batch, None, num_queries, num_keys, device="cuda", _compile=True)
    return functools.partial(torch.compile(flex_attention), block_mask=blocks)


# `torch_flash` is FlashAttention-2, as PyTorch ships it. `torch_cudnn` calls cuDNN without JAX.
TORCH_PEERS: dict[str, Callable[[Problem], Callable[..., Any]]] = {
    "torch_flash": functools.partial(_scaled_dot_product, "FLASH_ATTENTION"),
    "torch_cudnn": functools.partial(_scaled_dot_product, "CUDNN_ATTENTION"),
    "torch_flex": _flex,
}
