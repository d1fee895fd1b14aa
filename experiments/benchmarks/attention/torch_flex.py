"""PyTorch's FlexAttention as a contender, where PyTorch is installed.

PyTorch and JAX share the GPU's memory: run with `XLA_PYTHON_CLIENT_PREALLOCATE=false`.
"""

from __future__ import annotations

import functools
import time

from experiments.benchmarks.attention.cases import Direction, Problem
from experiments.benchmarks.attention.contenders import Contender


def compile_flex(problem: Problem, direction: Direction) -> Contender:
    """Compiles FlexAttention with a block mask of the problem's mask and documents, its inputs drawn afresh.

    Raises:
      ImportError: PyTorch isn't installed.
      ValueError: a mask that isn't an interval of distances.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, band = problem.case, problem.case.mask.band
    if band is None or band.kv_stop is not None or band.chunk_sizes:
        raise ValueError(f"torch_flex is written for masks of distances, not {case.mask!r}")
    left = problem.length if band.left is None else band.left
    right = problem.length if band.right is None else band.right
    ids = None if problem.segment_ids is None else torch.as_tensor(problem.segment_ids, device="cuda")

    def allowed(b, h, q, kv):
        inside = (kv - q <= right) & (q - kv <= left)
        return inside if ids is None else inside & (ids[b, q] == ids[b, kv])

    def normal(num_heads: int):
        shape = (case.batch, num_heads, problem.length, case.head_dim)
        return torch.randn(shape, device="cuda", dtype=getattr(torch, case.dtype), requires_grad=True)

    torch._dynamo.reset()
    begin = time.perf_counter()
    blocks = create_block_mask(allowed, case.batch, None, problem.length, problem.length, device="cuda", _compile=True)
    query, key, value = normal(case.num_heads), normal(case.num_kv_heads), normal(case.num_kv_heads)
    d_output = torch.randn_like(query)
    attend = functools.partial(
        torch.compile(flex_attention),
        query,
        key,
        value,
        block_mask=blocks,
        enable_gqa=case.num_heads != case.num_kv_heads,
    )

    def start():
        if direction == "forward":
            with torch.no_grad():
                return attend()
        return torch.autograd.grad(attend(), (query, key, value), d_output)

    start()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    return Contender("torch_flex", start, lambda _: torch.cuda.synchronize(), problem.length, compile_s, None)
