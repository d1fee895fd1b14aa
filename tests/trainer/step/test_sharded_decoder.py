"""A GPT with every field of a dense one set trains on meshes of eight fake CPU devices as on one."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.fresh_inputs import run_on_fresh_inputs
from tests.host_cpus import environment_of_cpus

SCRIPT = Path(__file__).parent / "sharded_decoder.py"


def test_loss_and_gradients_are_those_of_one_device():
    environment = environment_of_cpus(8) | {"JAX_ENABLE_X64": "1"}
    report = json.loads(run_on_fresh_inputs(SCRIPT, environment=environment).stdout)
    expected = report.pop("one device")
    # Embedding, head and final norm; for each of two stacks 4 + 3 kernels with biases, 6 norms and the sinks.
    assert len(expected["differences"]) == 3 + 2 * (2 * 7 + 6 + 1)
    for name, found in report.items():
        assert found["sums"] == pytest.approx(expected["sums"], rel=1e-12), name
        assert np.max(list(found["differences"].values())) < 1e-10, (name, found["differences"])
