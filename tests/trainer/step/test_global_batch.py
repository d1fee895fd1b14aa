"""What each process reads, and what each device gets of it, whichever process the devices of the mesh belong to."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from trainer.config import MeshConfig
from trainer.data import BatchShare
from trainer.step.global_batch import _part, indices_of_process, make_global_batch
from trainer.step.sharding import AXES, batch_sharding, make_mesh


@dataclass(frozen=True)
class Client:
    """One process's view of the devices, as JAX asks for it."""

    process: int

    def process_index(self) -> int:
        return self.process


@dataclass(frozen=True)
class Device:
    """As much of a device as a sharding needs."""

    id: int
    process_index: int
    client: Client
    platform: str = "cpu"
    device_kind: str = "cpu"


def sharding_seen_by(process: int, processes: np.ndarray, shape: tuple[int, ...]):
    """The batch's sharding as one process sees it, on a mesh whose devices belong to these processes."""
    devices = [Device(number, int(owner), Client(process)) for number, owner in enumerate(processes)]
    return batch_sharding(Mesh(np.array(devices).reshape(shape), AXES))


def read_rows(arrays: dict[str, np.ndarray], rows: tuple[int, ...]) -> BatchShare:
    """What a process reads of a batch."""
    batch_size = len(next(iter(arrays.values())))
    no_documents = (np.zeros(0, np.int64),) * batch_size
    return BatchShare({name: array[list(rows)] for name, array in arrays.items()}, rows, no_documents)


@pytest.mark.parametrize("_", range(12))
def test_processes_read_what_their_devices_need_and_together_the_whole_batch(_, rng):
    shape = tuple(int(size) for size in rng.choice([1, 2, 3, 4], 4))
    num_processes = int(rng.integers(1, 5))
    # Anywhere in the mesh, but each process has a device.
    processes = np.arange(math.prod(shape)) % num_processes
    rng.shuffle(processes)
    batch_size = shape[0] * shape[1] * int(rng.integers(1, 4))
    length = shape[3] * int(rng.integers(1, 9))
    batch = rng.integers(0, 1000, (batch_size, length))
    found = np.full_like(batch, -1)
    read = set()
    for process in np.unique(processes).tolist():
        sharding = sharding_seen_by(process, processes, shape)
        rows = indices_of_process(sharding, batch_size, length)
        share = read_rows({"tokens": batch}, rows)
        needed = set()
        for device, index in sharding.devices_indices_map(batch.shape).items():
            if device.process_index == process:
                np.testing.assert_array_equal(_part(share, share.arrays["tokens"], index), batch[index])
                found[index] = batch[index]
                needed |= set(range(batch_size)[index[0]])
        assert rows == tuple(sorted(needed)), "not a row more"
        read |= needed
    assert read == set(range(batch_size))
    np.testing.assert_array_equal(found, batch)


def test_processes_along_the_batch_axes_share_no_row():
    processes = np.repeat([0, 1], 4)
    shares = [indices_of_process(sharding_seen_by(process, processes, (2, 2, 1, 2)), 8, 16) for process in (0, 1)]
    assert shares == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # Along the context axis both need every row, of which each puts its tokens on its devices.
    processes = np.tile([0, 1], 4)
    shares = [indices_of_process(sharding_seen_by(process, processes, (2, 2, 1, 2)), 8, 16) for process in (0, 1)]
    assert shares == [tuple(range(8))] * 2


def test_one_process_puts_a_whole_batch_on_its_devices(rng):
    sharding = batch_sharding(make_mesh(MeshConfig()))
    arrays = {
        "tokens": rng.integers(0, 1000, (6, 16)).astype(np.int32),
        "weights": rng.standard_normal((6, 16)).astype(np.float32),
    }
    rows = indices_of_process(sharding, 6, 16)
    assert rows == tuple(range(6))
    batch = make_global_batch(read_rows(arrays, rows), sharding)
    expected = jax.device_put(arrays, sharding)
    assert batch.keys() == expected.keys()
    for name, array in expected.items():
        assert (batch[name].aval, batch[name].sharding) == (array.aval, array.sharding)
        np.testing.assert_array_equal(batch[name], array)
