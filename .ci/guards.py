"""Prints the folders of tests that guard the files that have changed since a commit.

    guards.py COMMIT

`.ci/run` runs a part of the tests in these folders that `make test` leaves to `make test-full`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

GUARDS = {
    "README.md": ("tests/test_readme.py",),
    "docs": ("tests/test_readme.py", "tests/layers/adapters"),
    "experiments": ("tests/experiments", "tests/test_readme.py"),
    "kernels": ("tests/kernels", "tests/layers", "tests/parity"),
    "layers": ("tests/layers", "tests/round_trips", "tests/parity"),
    "tests": (),
    "trainer": ("tests/trainer", "tests/parity", "tests/round_trips"),
}
"""For each file or folder at the top: the tests beside those that have its name."""


def guards_of(changed: str) -> set[str]:
    """The test files and folders that guard one file, both named from the repository's root.

    >>> sorted(guards_of("docs/masks.md"))
    ['tests/layers/adapters', 'tests/test_readme.py']
    >>> guards_of("tests/kernels/test_masks.py")
    {'tests/kernels/test_masks.py'}
    >>> guards_of("CHANGELOG.md")
    set()
    """
    top = changed.partition("/")[0]
    own = {changed} if top == "tests" and Path(changed).name.startswith("test_") else set()
    return own | set(GUARDS.get(top, ()))


def main(commit: str) -> None:
    """Prints one name a line."""
    command = ["git", "diff", "--name-only", commit, "HEAD"]
    changed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    guards = set().union(*map(guards_of, changed))
    print(*sorted(guard for guard in guards if (ROOT / guard).exists()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
