"""What is timed: one backend's compiled program for one problem and direction."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.attention.cases import Case, Direction, Problem, make_problem
from kernels import dot_product_attention


@dataclass
class Contender:
    """One backend, compiled, and its times.

    Attributes:
      start: starts one run and returns what `wait` waits for.
      length: of the problem that was timed; shorter than the case's where the dense backend doesn't fit.
      seconds: of one run, one per round.
    """

    backend: str
    start: Callable[[], Any]
    wait: Callable[[Any], Any]
    length: int
    compile_s: float
    temporary_bytes: int | None
    seconds: list[float] = field(default_factory=list)

    def time(self, num_runs: int) -> float:
        """Seconds of one of some runs in a row."""
        begin = time.perf_counter()
        for _ in range(num_runs):
            result = self.start()
        self.wait(result)
        return (time.perf_counter() - begin) / num_runs


def compile_contender(problem: Problem, backend: str, direction: Direction, dense_gigabytes: float) -> Contender:
    """Compiles a backend for a problem, the dense one at the longest length that fits.

    Raises:
      ValueError, ImportError: the backend can't serve the problem, or isn't installed.
    """
    if backend == "torch_flex":
        from experiments.benchmarks.attention.torch_flex import compile_flex

        return compile_flex(problem, direction)
    length = problem.length
    while True:
        shorter = problem if length == problem.length else make_problem(problem.case, length)
        attend = functools.partial(_attend, case=problem.case, segment_ids=shorter.segment_ids, backend=backend)
        run = jax.jit(_forward if direction == "forward" else _forward_backward, static_argnums=0)
        begin = time.perf_counter()
        program = run.lower(attend, shorter.arrays).compile()
        compile_s = time.perf_counter() - begin
        memory = program.memory_analysis()
        assert memory is not None, "every platform of JAX's own tells"
        if backend != "xla" or memory.temp_size_in_bytes < dense_gigabytes * 1e9:
            return Contender(
                backend,
                functools.partial(program, shorter.arrays),
                jax.block_until_ready,
                length,
                compile_s,
                memory.temp_size_in_bytes,
            )
        length //= 2


def _attend(query, key, value, *, case: Case, segment_ids, backend: str):
    if backend == "xla":
        return _dense(query, key, value, case, segment_ids)
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    return dot_product_attention(
        query, key, value, case.mask, query_segment_ids=ids, key_value_segment_ids=ids, implementation=backend
    )


def _dense(query, key, value, case: Case, segment_ids):
    """XLA's own attention, which builds the T×T logits."""
    band = case.mask.band
    if (
        band is None
        or band.kv_stop is not None
        or band.chunk_sizes
        or band.right not in (0, None)
        or segment_ids is not None
    ):
        raise ValueError(f"jax.nn has causal masks and causal windows only, not {case.mask!r} or packed documents")
    window = None if band.left is None else (band.left, 0)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=band.right == 0, local_window_size=window, implementation="xla"
    )


def _forward(attend: Callable, arrays: dict[str, jax.Array]):
    return attend(arrays["query"], arrays["key"], arrays["value"])


def _forward_backward(attend: Callable, arrays: dict[str, jax.Array]):
    output, vjp = jax.vjp(attend, arrays["query"], arrays["key"], arrays["value"])
    return output, vjp(arrays["d_output"])
