"""Fails if a run of the tests took longer than it may, and names the ten slowest tests.

    within.py MINUTES BEGUN REMEDY REPORT...

BEGUN is when the run began, in seconds since 1970. REPORT is a file of pytest's `--junitxml`; one that a run without
tests left out is passed over.
"""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path


def slowest_tests(reports: list[Path], count: int) -> list[tuple[float, str]]:
    """Seconds and names of the tests that took the longest, in descending order."""
    cases = [case for report in reports if report.exists() for case in ET.parse(report).iter("testcase")]
    timed = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(timed, reverse=True)[:count]


def main(minutes: str, begun: str, remedy: str, *reports: str) -> int:
    """Prints how long the run took; returns the exit status."""
    taken = (time.time() - float(begun)) / 60
    print(f"{taken:.1f} minutes, of {minutes} at most")
    if taken <= float(minutes):
        return 0
    print(f"error: too slow; move tests to `make test-full`, or make these faster ({remedy}):", file=sys.stderr)
    for seconds, name in slowest_tests([Path(report) for report in reports], 10):
        print(f"{seconds:8.1f} s  {name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
