"""A GPT with every field of a dense one set trains on meshes of eight fake CPU devices as on one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.host_cpus import environment_of_cpus

SCRIPT = Path(__file__).parent / "sharded_decoder.py"


def test_loss_and_gradients_are_those_of_one_device():
    seed = int(np.random.default_rng().integers(2**31))
    print(f"Inputs: {SCRIPT.name} {seed}")
    environment = environment_of_cpus(8) | {"JAX_ENABLE_X64": "1"}
    done = subprocess.run([sys.executable, SCRIPT, str(seed)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    expected = report.pop("one device")
    # Embedding, head and final norm; for each of two stacks 4 + 3 kernels with biases, 6 norms and the sinks.
    assert len(expected["differences"]) == 3 + 2 * (2 * 7 + 6 + 1)
    for name, found in report.items():
        assert found["sums"] == pytest.approx(expected["sums"], rel=1e-12), name
        assert np.max(list(found["differences"].values())) < 1e-10, (name, found["differences"])
