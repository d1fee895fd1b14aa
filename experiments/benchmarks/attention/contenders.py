"""A timed contender: one backend's compiled program for one problem and direction."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.attention.cases import Arrays, Direction, Problem, draw_arrays, make_problem
from experiments.benchmarks.attention.peers import PEERS
from experiments.benchmarks.attention.timing import AttentionContender
from experiments.benchmarks.attention.torch_peers import TORCH_PEERS, compile_torch
from kernels import dot_product_attention
from kernels.backends.tuning import MosaicGpuTuning, TritonTuning, Tuning
from trainer.compile.stages import Lowering, compile_lowering, lower_in_stages

FORMS: dict[str, Tuning] = {
    "mosaic_gpu_fused": MosaicGpuTuning("fused"),
    "mosaic_gpu_split": MosaicGpuTuning("split"),
    "triton_fused": TritonTuning("fused"),
    "triton_split": TritonTuning("split"),
}
"""Backends that have two forms of backward, with one of the forms."""


def compile_contender(
    problem: Problem, backend: str | Tuning, direction: Direction, dense_gigabytes: float = math.inf
) -> AttentionContender:
    """Compiles a backend for a problem, `xla` at the longest power of two below the length at which it fits.

    Args:
      backend: a name or a tuning of the backends' table, or a name of FORMS, of PEERS or of TORCH_PEERS.
      dense_gigabytes: memory that the logits, weights and their gradients of `xla` may take.

    Raises:
      ValueError: ours can't serve the problem. Others raise what they like.
      ImportError: the backend isn't installed.
    """
    if isinstance(backend, str) and backend in TORCH_PEERS:
        return compile_torch(problem, backend, direction)
    length = problem.length
    # The logits, the weights and the gradients of both, in float32.
    per_pair = 4 * 4 * problem.case.batch * problem.case.num_heads
    while backend == "xla" and per_pair * length * problem.case.num_keys(length) > dense_gigabytes * 1e9:
        length //= 2
    problem = problem if length == problem.length else make_problem(problem.case, length)
    begin = time.perf_counter()
    program, _ = compile_lowering(lower(problem, backend, direction), name=direction)
    compile_s = time.perf_counter() - begin
    memory = program.memory_analysis()
    assert memory is not None, "every platform of JAX's own has it"
    return AttentionContender(
        backend if isinstance(backend, str) else repr(backend),
        functools.partial(program, problem.arrays, problem.tokens),
        jax.block_until_ready,
        length,
        compile_s,
        memory.temp_size_in_bytes,
    )


def compile_calls(
    contender: AttentionContender, problem: Problem, backend: str, direction: Direction, num_calls: int
) -> AttentionContender:
    """The contender with a program of several calls, which follow one another as a model's layers do.

    Each has inputs of its own. Seconds of compilation and temporary memory stay those of one call. In PyTorch, a loop
    in Python stands for the program.
    """
    if backend in TORCH_PEERS:
        calls = compile_torch(problem, backend, direction, num_calls)
        return dataclasses.replace(calls, compile_s=contender.compile_s)
    # Traced and lowered once, however often it is called.
    call, rng = jax.jit(_function(problem, backend, direction)), np.random.default_rng()

    def run(inputs: list[Arrays], tokens):
        results: list[Any] = []
        for arrays in inputs:
            if results:
                # A layer waits for the one before; calls that don't might run side by side, or share kernels.
                results[-1], arrays = jax.lax.optimization_barrier((results[-1], arrays))
            results.append(call(arrays, tokens))
        return results

    inputs = [draw_arrays(problem.case, contender.length, rng) for _ in range(num_calls)]
    program = jax.jit(run).lower(inputs, problem.tokens).compile()
    start = functools.partial(program, inputs, problem.tokens)
    return dataclasses.replace(contender, start=start, calls_per_program=num_calls)


def lower(problem: Problem, backend: str | Tuning, direction: Direction) -> Lowering:
    """Traces and lowers a backend of JAX for a problem.

    Segment ids and bounds are inputs: a constant's tiles would be planned while compiling.
    """
    return lower_in_stages(jax.jit(_function(problem, backend, direction)), problem.arrays, problem.tokens)


def _function(problem: Problem, backend: str | Tuning, direction: Direction) -> Callable[[Arrays, Any], Any]:
    """One call as a function of arrays, and of segment ids and bounds."""

    def attend(query, key, value, sinks=None, *, tokens):
        segment_ids, bounds = tokens
        if isinstance(backend, str) and backend in PEERS:
            if bounds is not None:
                raise ValueError("has no bounds")
            return PEERS[backend](query, key, value, sinks, segment_ids, problem)
        return dot_product_attention(
            query,
            key,
            value,
            problem.case.mask,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            bounds=bounds,
            sinks=sinks,
            implementation=FORMS.get(backend, backend) if isinstance(backend, str) else backend,
        )

    def forward(arrays, tokens):
        return attend(*(arrays[name] for name in problem.case.inputs), tokens=tokens)

    def forward_backward(arrays, tokens):
        one_problem = functools.partial(attend, tokens=tokens)
        output, vjp = jax.vjp(one_problem, *(arrays[name] for name in problem.case.inputs))
        return output, vjp(arrays["d_output"])

    return forward if direction == "forward" else forward_backward
