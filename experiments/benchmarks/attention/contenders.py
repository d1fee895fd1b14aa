"""What is timed: one backend's compiled program for one problem and direction."""

from __future__ import annotations

import functools
import math
import time

import jax
import numpy as np

from experiments.benchmarks.attention.cases import Direction, Problem, make_problem
from experiments.benchmarks.attention.peers import PEERS
from experiments.benchmarks.attention.timing import Contender
from experiments.benchmarks.attention.torch_peers import TORCH_PEERS, compile_torch
from kernels import dot_product_attention
from kernels.tuning import MosaicGpuTuning, TritonTuning, Tuning

FORMS: dict[str, Tuning] = {
    "mosaic_gpu_fused": MosaicGpuTuning("fused"),
    "mosaic_gpu_split": MosaicGpuTuning("split"),
    "triton_fused": TritonTuning("fused"),
    "triton_split": TritonTuning("split"),
}
"""Backends whose backward has two forms, with one of them."""


def compile_contender(
    problem: Problem, backend: str | Tuning, direction: Direction, dense_gigabytes: float = math.inf
) -> Contender:
    """Compiles a backend for a problem, `xla` at the longest power of two below the length at which it fits.

    Args:
      backend: a name or a tuning of the backends' table, or a name of FORMS, of PEERS or of TORCH_PEERS.
      dense_gigabytes: temporary memory that `xla` may take.

    Raises:
      ValueError: ours can't serve the problem. Others raise what they like.
      ImportError: the backend isn't installed.
    """
    if isinstance(backend, str) and backend in TORCH_PEERS:
        return compile_torch(problem, backend, direction)
    length = problem.length
    if backend == "xla":
        # No length needs to be compiled at which two arrays of weights alone don't fit, one each way.
        weights = problem.case.batch * problem.case.num_heads * np.dtype(problem.case.dtype).itemsize
        while 2 * weights * length**2 > dense_gigabytes * 1e9:
            length //= 2
    while True:
        shorter = problem if length == problem.length else make_problem(problem.case, length)
        begin = time.perf_counter()
        program = lower(shorter, backend, direction).compile()
        compile_s = time.perf_counter() - begin
        memory = program.memory_analysis()
        assert memory is not None, "every platform of JAX's own tells"
        if backend != "xla" or memory.temp_size_in_bytes < dense_gigabytes * 1e9:
            return Contender(
                backend if isinstance(backend, str) else repr(backend),
                functools.partial(program, shorter.arrays, shorter.segment_ids),
                jax.block_until_ready,
                length,
                compile_s,
                memory.temp_size_in_bytes,
            )
        length //= 2


def lower(problem: Problem, backend: str | Tuning, direction: Direction) -> jax.stages.Lowered:
    """Traces and lowers a backend of JAX for a problem.

    Segment ids are an input: a constant's tiles would be planned while compiling.
    """

    def attend(query, key, value, segment_ids):
        if isinstance(backend, str) and backend in PEERS:
            return PEERS[backend](query, key, value, problem.case, segment_ids)
        return dot_product_attention(
            query,
            key,
            value,
            problem.case.mask,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            implementation=FORMS.get(backend, backend) if isinstance(backend, str) else backend,
        )

    def forward(arrays, segment_ids):
        return attend(arrays["query"], arrays["key"], arrays["value"], segment_ids)

    def forward_backward(arrays, segment_ids):
        one_problem = functools.partial(attend, segment_ids=segment_ids)
        output, vjp = jax.vjp(one_problem, arrays["query"], arrays["key"], arrays["value"])
        return output, vjp(arrays["d_output"])

    run = forward if direction == "forward" else forward_backward
    return jax.jit(run).lower(problem.arrays, problem.segment_ids)
