"""Holds training on meshes of eight CPU devices to training on one device. Run by test_parity.py, and by hand:

python -m tests.parity --all --jobs 2         # the whole matrix, about an hour on two cores
python -m tests.parity --sample 4             # some of it, drawn anew
python -m tests.parity --case 'attention=…'   # one case, as a failure names it
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from tests.host_cpus import environment_of_cpus

# Before JAX is imported, here and in the processes that are started from here.
os.environ.update(environment_of_cpus(8) | {"JAX_ENABLE_X64": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"})

import jax

from tests.parity.cases import Case, Placement, Problem, sample, whole_matrix
from tests.parity.comparison import Comparison
from tests.parity.faults import FAULTS, FAULTY


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
    verdict = comparison.judge_one_device()
    tally = Tally().add(verdict.passed, f"{Case(problem, Placement())}, and the oracle: {verdict.text}")
    for case in cases:
        verdict = comparison.judge(case)
        tally = tally.add(verdict.passed, f"{case}: {verdict.text}")
    jax.clear_caches()
    return tally


def run_faults() -> Tally:
    """Judges one case with each fault and without. It passes with none, and a fault passes if it is found."""
    comparison = Comparison(FAULTY.problem)
    verdict = comparison.judge(FAULTY)
    tally = Tally().add(verdict.passed, f"no fault: {verdict.text}")
    for fault in FAULTS:
        verdict = comparison.judge(FAULTY, fault)
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
    # A forked process would share XLA's threads. A new one from time to time gives memory back.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=4) as pool:
        yield from pool.map(run_group, by_problem.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.split(":")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every case")
    what.add_argument("--sample", type=int, metavar="N", help="some cases of each of N problems")
    what.add_argument("--case", type=Case.parse, help="one case, by its text")
    what.add_argument("--faults", action="store_true", help="one case with each of the faults that are to be found")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of everything drawn; default: fresh")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()

    start = time.monotonic()
    if arguments.faults:
        tallies = [run_faults()]
    else:
        if arguments.case is not None:
            cases = [arguments.case]
        elif arguments.all:
            cases = list(whole_matrix(arguments.seed))
        else:
            cases = sample(arguments.seed, arguments.sample)
        print(f"{len(cases)} cases, --seed {arguments.seed}", flush=True)
        tallies = list(run_groups(cases, arguments.jobs))
    num_passed, num_failed = map(sum, zip(*tallies, strict=True))
    print(f"{num_passed} passed, {num_failed} failed, in {time.monotonic() - start:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
