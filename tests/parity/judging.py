"""Judges cases of the matrix, a problem at a time, here or in processes of its own.

Apart from `__main__`, which a started process doesn't import.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import jax

from tests.parity.cases import Case, Problem
from tests.parity.comparison import Comparison
from tests.parity.faults import FAULTS


class Tally(NamedTuple):
    """Cases that were run."""

    num_passed: int = 0
    num_failed: int = 0

    def add(self, passed: bool, text: str) -> Tally:
        """Prints and counts one more."""
        print("passed" if passed else "FAILED", text, flush=True)
        return Tally(self.num_passed + passed, self.num_failed + (not passed))


def run_group(cases: Sequence[Case]) -> Tally:
    """Judges cases of one problem."""
    gc.set_threshold(200_000, 20, 100)  # as tests/conftest.py does
    problem = cases[0].problem
    comparison = Comparison(problem)
    tally = Tally()
    for placement in dict.fromkeys(comparison.on_one_device(case.placement) for case in cases):
        verdict = comparison.judge_one_device(placement)
        tally = tally.add(verdict.passed, f"{Case(problem, placement)}, and the oracle: {verdict.text}")
    for case in cases:
        verdict = comparison.judge(case)
        tally = tally.add(verdict.passed, f"{case}: {verdict.text}")
    jax.clear_caches()
    return tally


def run_faults() -> Tally:
    """Judges a case with each of its faults and without. It passes with none, and a fault passes if it is found."""
    tally = Tally()
    for case, faults in FAULTS.items():
        comparison = Comparison(case.problem)
        verdict = comparison.judge(case)
        tally = tally.add(verdict.passed, f"no fault in {case.problem.attention}, {case.problem.mlp}: {verdict.text}")
        for fault in faults:
            verdict = comparison.judge(case, fault)
            tally = tally.add(not verdict.passed, f"{fault}: {verdict.text}")
    return tally


def run_groups(cases: Sequence[Case], num_jobs: int) -> Iterator[Tally]:
    """Judges cases, those of a problem together."""
    by_problem: dict[Problem, list[Case]] = {}
    for case in cases:
        by_problem.setdefault(case.problem, []).append(case)
    if num_jobs == 1:
        yield from map(run_group, by_problem.values())
        return
    # A forked process would share XLA's threads.
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_group, by_problem.values())
