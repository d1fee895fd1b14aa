"""Arrays of a checkpoint, read slice by slice: the saved bits, and each chunk once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.checkpoints import training_state
from trainer.checkpoints.stored_array import StoredArray, UnreadableArray
from trainer.checkpoints.training_state import Checkpoints


@pytest.fixture(params=["a row to a chunk", "all rows in one"])
def saved(request, tmp_path, rng, monkeypatch):
    """The state of a checkpoint, and the folder that Orbax wrote it to."""
    if request.param == "a row to a chunk":
        monkeypatch.setattr(training_state, "_ROW_BYTES", 8)
    state = {
        "stack": jnp.asarray(rng.normal(size=(6, 5, 4)), jnp.float32),
        "experts": jnp.asarray(rng.normal(size=(3, 4, 2, 2)), jnp.bfloat16),
        "vector": jnp.asarray(rng.normal(size=7), jnp.float32),
        "step": jnp.int32(rng.integers(1000)),
    }
    checkpoints = Checkpoints(tmp_path, num_kept=1)
    checkpoints.save(1, state, None)
    checkpoints.close()
    return state, tmp_path / "1" / "state"


def test_slices_have_the_saved_bits(saved, rng):
    state, folder = saved
    for name, array in state.items():
        stored = StoredArray(folder, name)
        assert (stored.shape, stored.dtype) == (array.shape, array.dtype)
        for _ in range(100):
            bounds = [sorted(rng.integers(0, size + 1, 2).tolist()) for size in array.shape]
            index = tuple(slice(*pair) for pair in bounds)
            np.testing.assert_array_equal(stored.read(index), np.asarray(array)[index], f"{name} {index}")


def test_in_ascending_order_each_chunk_is_read_once_and_let_go(saved, monkeypatch):
    state, folder = saved
    reads = []
    read_rows = StoredArray._read_rows
    monkeypatch.setattr(StoredArray, "_read_rows", lambda self, rows: reads.append(rows) or read_rows(self, rows))
    stored = StoredArray(folder, "experts")
    for layer, expert in np.ndindex(3, 4):
        part = stored.read((slice(layer, layer + 1), slice(expert, expert + 1), slice(0, 2), slice(0, 2)))
        np.testing.assert_array_equal(part[0, 0], np.asarray(state["experts"])[layer, expert])
    assert reads in ([slice(0, 3)], [slice(row, row + 1) for row in range(3)])
    assert stored._held is None


def test_what_is_not_there_is_told_in_one_line(saved):
    with pytest.raises(UnreadableArray, match=r"^it has no array absent: .+$") as told:
        StoredArray(saved[1], "absent")
    assert "tensorstore_spec" not in str(told.value)


def test_large_rows_alone_get_chunks_of_their_own():
    small, large = jnp.zeros((4, 255, 256)), jnp.zeros((4, 256, 256))
    axes = jax.tree.map(lambda args: args.shard_axes, training_state._chunks({"small": small, "large": large}))
    assert axes == {"small": (), "large": (0,)}
