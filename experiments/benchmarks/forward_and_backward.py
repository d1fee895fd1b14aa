"""A function's forward, and its forward with its backward, timed in one round after another.

Backward is the time of both less that of forward, in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.benchmarks.attention.timing import how_many_last


class ForwardAndBackward:
    """The two programs of a function, compiled and run once.

    Args:
      function: of the arguments, and differentiable in each of them.
      arguments: arrays, or trees of them.
      cotangent: of the function's result.
      compiler_options: of both programs, as of `jax.stages.Lowered.compile`.

    Attributes:
      results: of the function and of its gradient; a caller that has no use for them sets None.
      temporary_bytes: memory of forward and backward besides arguments and results.
      seconds: of forward and of backward, one pair a round.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        cotangent: Any,
        compiler_options: dict[str, str | bool] | None = None,
    ):
        def both(cotangent: Any, *arguments: Any) -> tuple[Any, Any]:
            output, vjp = jax.vjp(function, *arguments)
            return output, vjp(cotangent)

        forward_program = jax.jit(function).lower(*arguments).compile(compiler_options)
        program = jax.jit(both).lower(cotangent, *arguments).compile(compiler_options)
        memory = program.memory_analysis()
        self.temporary_bytes = 0 if memory is None else memory.temp_size_in_bytes
        self._forward = lambda: forward_program(*arguments)
        self._both = lambda: program(cotangent, *arguments)
        self.results = jax.block_until_ready(self._both())
        jax.block_until_ready(self._forward())
        self.seconds: list[tuple[float, float]] = []

    def measure(self, sample_ms: float) -> None:
        """Adds a round of samples that last at least so long."""
        forward, both = _seconds(self._forward, sample_ms), _seconds(self._both, sample_ms)
        self.seconds.append((forward, both - forward))


def _seconds(run: Callable[[], Any], sample_ms: float) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(run())
    num_runs = max(2, how_many_last(sample_ms, time.perf_counter() - begun))
    begun = time.perf_counter()
    for _ in range(num_runs):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / num_runs
