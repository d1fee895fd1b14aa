"""Sends pretrained models into shards of eight CPU devices and back. Run by test_round_trips.py, and by hand:

python -m tests.round_trips --all --jobs 2          # the whole matrix
python -m tests.round_trips --sample 2 --faults     # some of it, drawn anew, and mistakes that are to be found
python -m tests.round_trips --case 'trip=…'         # one case, as a failure names it
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.host_cpus import environment_of_cpus
from tests.seeds import run_seed

# Before JAX is imported, here and in the processes that are started from here.
os.environ.update(environment_of_cpus(8) | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"})

from tests.round_trips.cases import Case, sample, whole_matrix
from tests.round_trips.faults import FAULTS, FAULTY, injected
from tests.round_trips.trips import judge, judge_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.round_trips", description=__doc__.split(":")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="every case")
    what.add_argument("--sample", type=int, metavar="N", help="folders of N models, a run, and a model's logits")
    what.add_argument("--case", type=Case.parse, help="one case, by its text")
    parser.add_argument("--faults", action="store_true", help="one case with each of the faults that are to be found")
    parser.add_argument("--seed", type=int, default=run_seed() % 2**31, help="of everything drawn; default: fresh")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    if not (arguments.all or arguments.sample or arguments.case or arguments.faults):
        parser.error("nothing to run; give --all, --sample N, --case TEXT or --faults")

    start, counts = time.monotonic(), Counter()

    def tell(passed: bool, text: str) -> None:
        counts[passed] += 1
        print("passed" if passed else "FAILED", text, flush=True)

    if arguments.case is not None:
        cases = [arguments.case]
    elif arguments.all:
        cases = list(whole_matrix(arguments.seed))
    else:
        cases = sample(arguments.seed, arguments.sample) if arguments.sample else []
    print(f"{len(cases)} cases, --seed {arguments.seed}", flush=True)
    for case, verdict in zip(cases, judge_all(cases, arguments.jobs), strict=True):
        tell(verdict.passed, f"{case}: {verdict.text}")
    if arguments.faults:
        verdict = judge(FAULTY)
        tell(verdict.passed, f"no fault: {verdict.text}")
        for fault in FAULTS:
            with injected(fault):
                verdict = judge(FAULTY)
            tell(not verdict.passed, f"{fault}: {verdict.text}")
    print(f"{counts[True]} passed, {counts[False]} failed, in {time.monotonic() - start:.0f} s")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    sys.exit(main())
