"""Holds training on meshes of eight CPU devices to training on one device. Run by test_parity.py, and by hand:

python -m tests.parity --all --jobs 2         # the whole matrix, about an hour on two cores
python -m tests.parity --sample 4             # some of it, drawn anew
python -m tests.parity --case 'attention=…'   # one case, as a failure names it
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.host_cpus import environment_of_cpus
from tests.seeds import run_seed

# Before JAX is imported, here and in the processes that are started from here.
os.environ.update(environment_of_cpus(8) | {"JAX_ENABLE_X64": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"})

from tests.parity.cases import Case, sample, whole_matrix
from tests.parity.judging import run_faults, run_groups


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.split(":")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every case")
    what.add_argument("--sample", type=int, metavar="N", help="some cases of each of N problems")
    what.add_argument("--case", type=Case.parse, help="one case, by its text")
    what.add_argument("--faults", action="store_true", help="the faults that are to be found, each in a case")
    parser.add_argument("--seed", type=int, default=run_seed() % 2**31, help="of everything drawn; default: fresh")
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
