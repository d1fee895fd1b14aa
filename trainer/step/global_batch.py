"""Makes a global batch: the sequences that each process reads, and the part of them that each device gets."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Shaped

from trainer.data import BatchShare


def indices_of_process(sharding: NamedSharding, batch_size: int, sequence_length: int) -> tuple[int, ...]:
    """The indices of the sequences of a batch that this process's devices hold, rising, wherever these devices are.

    Args:
      sharding: from `batch_sharding`.
      batch_size: sequences of the batch, over all processes.
      sequence_length: tokens of a sequence.
    """
    slices = sharding.addressable_devices_indices_map((batch_size, sequence_length)).values()
    return tuple(sorted({index for part, _ in filter(None, slices) for index in range(*part.indices(batch_size))}))


def make_global_batch(share: BatchShare, sharding: NamedSharding) -> dict[str, jax.Array]:
    """The global arrays [B, T] of a batch, of which each process puts its part on its devices.

    Args:
      share: the sequences of `indices_of_process`.
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
) -> Shaped[np.ndarray, "sequences tokens"]:
    """The part of a process's sequences that lies at an index of the global array.

    A device's sequences are neighbours in the batch, so they are neighbours among the process's sequences, too.
    """
    sequences, tokens = index
    start, stop, _ = sequences.indices(share.batch_size)
    first = share.indices.index(start)
    return array[first : first + stop - start, tokens]
