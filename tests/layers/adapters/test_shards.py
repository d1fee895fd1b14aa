"""What all adapters share: attention in shards of a mesh, and modules that import none of the packages."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from kernels import CausalMask
from layers.adapters.shards import attend_in_shards
from tests.fresh_inputs import run_on_fresh_inputs
from tests.host_cpus import environment_of_cpus

HERE = Path(__file__).parent
ADAPTED = {"bonsai", "gemma", "haliax", "levanter", "maxtext"}


@pytest.fixture(scope="module")
def eight_devices():
    finished = run_on_fresh_inputs(HERE / "eight_devices.py", environment=environment_of_cpus(8))
    return json.loads(finished.stdout.splitlines()[-1])


def test_shards_give_what_one_device_gives(eight_devices):
    assert len(eight_devices["differences"]) == 5
    assert max(eight_devices["differences"]) < 1e-5


def test_adapters_import_no_package(eight_devices):
    assert "jax" in eight_devices["packages"]
    assert not ADAPTED.intersection(eight_devices["packages"])


@pytest.mark.parametrize(
    ("batch", "num_heads", "num_kv_heads", "message"),
    [
        (3, 4, 2, "batch size 3 is not a multiple of the mesh's data=2; change one of them"),
        (2, 3, 1, "number of query heads 3 is not a multiple of the mesh's model=2"),
        (2, 4, 1, "number of key/value heads 1 is not a multiple of the mesh's model=2"),
    ],
)
def test_refuses_what_does_not_divide(batch, num_heads, num_kv_heads, message):
    query, key = jnp.ones((batch, 4, num_heads, 8)), jnp.ones((batch, 4, num_kv_heads, 8))
    with pytest.raises(ValueError, match=message):
        attend_in_shards(AbstractMesh((2, 2), ("data", "model")), ("data",), ("model",), query, key, key, CausalMask())
