"""Holds training on meshes of eight CPU devices to training on one device. Run by test_parity.py, and by hand:

python -m tests.parity --all --jobs 2         # the whole matrix, about an hour on two cores
python -m tests.parity --sample 4             # some of it, drawn anew
python -m tests.parity --case 'attention=…'   # one case, as a failure names it
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.host_cpus import environment_of_cpus

# Before JAX is imported, here and in the processes that are started from here.
os.environ.update(environment_of_cpus(8) | {"JAX_ENABLE_X64": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"})

import jax

from tests.parity.cases import Case, sample, whole_matrix
from tests.parity.comparison import Comparison
from tests.parity.faults import FAULTS, FAULTY

Report = tuple[bool, str]


def run_group(cases: list[Case]) -> list[Report]:
    """Judges the cases of one problem: whether each passed, and a line about it."""
    gc.set_threshold(200_000, 20, 100)  # as tests/conftest.py does
    comparison = Comparison(cases[0].problem)
    reports = []
    for case in cases:
        verdict = comparison.judge(case)
        reports.append((verdict.passed, f"{case}: {verdict.text}"))
    jax.clear_caches()
    return reports


def run_faults() -> list[Report]:
    """Judges the same case with each fault and without: a fault passes if the comparison fails."""
    comparison = Comparison(FAULTY.problem)
    without = comparison.judge(FAULTY)
    reports = [(without.passed, f"no fault: {without.text}")]
    for fault in FAULTS:
        verdict = comparison.judge(FAULTY, fault)
        reports.append((not verdict.passed, f"{fault}: {verdict.text}"))
    return reports


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

    start, failures, num_reports = time.monotonic(), 0, 0
    if arguments.faults:
        groups_of_reports = iter([run_faults()])
    else:
        if arguments.case is not None:
            cases = [arguments.case]
        elif arguments.all:
            cases = list(whole_matrix(arguments.seed))
        else:
            cases = sample(arguments.seed, arguments.sample)
        print(f"{len(cases)} cases, --seed {arguments.seed}", flush=True)
        by_problem = lambda case: str(case.problem)  # noqa: E731
        groups = [list(group) for _, group in itertools.groupby(sorted(cases, key=by_problem), by_problem)]
        groups_of_reports = in_processes(groups, arguments.jobs)
    for passed, line in itertools.chain.from_iterable(groups_of_reports):
        print("passed" if passed else "FAILED", line, flush=True)
        failures, num_reports = failures + (not passed), num_reports + 1
    print(f"{num_reports} run, {failures} failed, in {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


def in_processes(groups: list[list[Case]], num_jobs: int):
    """The groups' reports, as they come."""
    if num_jobs == 1:
        yield from map(run_group, groups)
        return
    # Forked processes would share XLA's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=4) as pool:
        for done in as_completed([pool.submit(run_group, group) for group in groups]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
