"""The seed of a test run. Every random draw of the tests follows from it, those at import too.

The first process of a run chooses the seed, and the others (pytest's workers, scripts that tests start) inherit it
through the environment. `pytest --rng-seed N` brings a run's draws back.
"""

from __future__ import annotations

import os
import secrets
import zlib

import numpy as np

_VARIABLE = "TESTS_RNG_SEED"


def run_seed(given: int | None = None) -> int:
    """The seed of this run: `given`, or the one chosen before, or a fresh one."""
    if given is not None:
        os.environ[_VARIABLE] = str(given)
    return int(os.environ.setdefault(_VARIABLE, str(secrets.randbits(32))))


def seeded_rng(name: str) -> np.random.Generator:
    """A generator whose numbers follow from the run's seed and the name of what draws them."""
    return np.random.default_rng([run_seed(), zlib.crc32(name.encode())])
