"""Scripts that tests run in a process of their own, as the share of a GPU's memory is that of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def run_on_fresh_inputs(
    script: Path, *arguments: object, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs `SCRIPT SEED ARGUMENTS` with a fresh seed, which a failure's report shows; returns what it printed.

    A script that ends with another status than 0 fails the test, with what it wrote to standard error.
    """
    told = [str(np.random.default_rng().integers(2**31)), *map(str, arguments)]
    print(f"Inputs: {script.name} {' '.join(told)}")
    command = [sys.executable, script, *told]
    python_path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    # A test may take 300 s.
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": python_path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done
