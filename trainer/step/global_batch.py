"""Makes a global batch of what each process has read: which rows a process reads, and which part each device gets."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Shaped

from trainer.data import BatchShare


def rows_of_process(sharding: NamedSharding, batch_size: int, sequence_length: int) -> tuple[int, ...]:
    """The rows of a batch that this process's devices hold, rising, wherever in the mesh these devices are.

    Args:
      sharding: from `batch_sharding`.
      batch_size: rows of the batch, over all processes.
      sequence_length: tokens of a row.
    """
    indices = sharding.addressable_devices_indices_map((batch_size, sequence_length)).values()
    return tuple(sorted({row for rows, _ in filter(None, indices) for row in range(*rows.indices(batch_size))}))


def make_global_batch(share: BatchShare, sharding: NamedSharding) -> dict[str, jax.Array]:
    """The global arrays [B, T] of a batch, of which each process puts its part on its devices.

    Args:
      share: the rows that `rows_of_process` tells of this process.
      sharding: from `batch_sharding`.
    """
    return {
        name: jax.make_array_from_callback(
            (share.batch_size, array.shape[1]), sharding, functools.partial(_part, share, array)
        )
        for name, array in share.arrays.items()
    }


def _part(
    share: BatchShare, array: Shaped[np.ndarray, "b T"], index: tuple[slice, slice]
) -> Shaped[np.ndarray, "rows tokens"]:
    """The part of a process's rows that lies at an index of the global array.

    A device's rows are neighbours in the batch, so they are neighbours among the process's rows, too.
    """
    rows, tokens = index
    start, stop, _ = rows.indices(share.batch_size)
    first = share.rows.index(start)
    return array[first : first + stop - start, tokens]
