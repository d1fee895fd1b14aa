"""Candidates side by side: held to the same results, timed in rounds of all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.attention.cases import Direction, Problem
from experiments.benchmarks.attention.contenders import compile_contender
from experiments.benchmarks.attention.measure import reason
from experiments.benchmarks.attention.timing import AttentionContender, time_in_rounds
from kernels.backends.tuning import Tuning


@dataclass(frozen=True)
class Trial:
    """One candidate and how it did.

    Attributes:
      seconds: of one run, the median; None if it wasn't timed in rounds.
      refused: why it wasn't.
    """

    tuning: Any
    seconds: float | None = None
    refused: str | None = None


def race(
    problem: Problem,
    timed: Direction,
    candidates: Mapping[Any, Tuning],
    expected: Any,
    *,
    num_rounds: int,
    sample_ms: float,
    largest_difference: float = 0.02,
    hopeless: float = 1.25,
) -> list[Trial]:
    """Times candidates in rounds, each of which times every one.

    Args:
      candidates: tunings, and each as the kernels take it.
      expected: the results of another backend for the same problem and direction.
      largest_difference: from what is expected, the Frobenius norm relative to its own; rounding to 16 bits leaves some
        thousandths.
      hopeless: a candidate whose first sample takes this many times the fastest one's leaves the rounds. It has a
        second sample before that: a single one may be of twice the time for reasons that aren't the kernel's.

    Returns:
      One trial per candidate, in their order.
    """
    refused: dict[Any, str] = {}
    contenders: dict[Any, AttentionContender] = {}
    first: dict[Any, float] = {}
    # One after another: threads mustn't lower kernels at a time (kernels/hopper/begin_kernel.py).
    for tuning, implementation in candidates.items():
        try:
            contender = compile_contender(problem, implementation, timed)
            if (difference := largest_relative_difference(contender.start(), expected)) <= largest_difference:
                contender.prepare(sample_ms)
                # A whole sample: single runs of less than a millisecond scatter by half.
                contenders[tuning], first[tuning] = contender, contender.time(contender.num_runs)
            else:  # also where it's NaN
                refused[tuning] = f"differs by {difference:.1e}"
        except Exception as failure:  # whatever a compiler makes of an odd tuning
            refused[tuning] = reason(failure)
    fastest = min(first.values(), default=0.0)
    for tuning, seconds in first.items():
        if seconds > hopeless * fastest:
            seconds = min(seconds, contenders[tuning].time(contenders[tuning].num_runs))
        if (slower := seconds / fastest) > hopeless:
            refused[tuning] = f"takes {slower:.1f} times as long as the fastest"
            del contenders[tuning]
    time_in_rounds([[contender] for contender in contenders.values()], num_rounds)
    return [
        Trial(tuning, refused=refused[tuning])
        if tuning in refused
        else Trial(tuning, statistics.median(contenders[tuning].seconds))
        for tuning in candidates
    ]


def best_of(trials: Sequence[Trial], incumbent: Any, least_gain: float = 0.01) -> Any | None:
    """The fastest tuning, or the incumbent if none is faster than it by `least_gain`, so that a tie changes nothing.

    None if nothing ran.
    """
    seconds = {trial.tuning: trial.seconds for trial in trials if trial.seconds is not None}
    if not seconds:
        return None
    fastest = min(seconds, key=seconds.__getitem__)
    keeps = incumbent in seconds and seconds[incumbent] <= seconds[fastest] * (1 + least_gain)
    return incumbent if keeps else fastest


@jax.jit
def _relative_differences(computed, expected):
    def difference(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    return jnp.stack(jax.tree.leaves(jax.tree.map(difference, computed, expected)))


def largest_relative_difference(computed: Any, expected: Any) -> float:
    """The largest relative difference of all arrays, by the Frobenius norm. NaN if any is NaN."""
    return float(_relative_differences(computed, expected).max())
