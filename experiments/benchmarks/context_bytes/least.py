"""The fewest bytes with which queries can stay on their ranks, from the mask's intervals and the sharding.

A rank receives the keys and values that its queries attend to and that it doesn't hold: once in the forward pass, and
once more in the backward pass, since gathered keys aren't kept for every layer. In the backward pass it gives back as
many gradients, summed in float32. Fewer bytes may do where queries travel and not keys (the exchange `heads`), and
where gradients are one kernel's, which has rounded them (`halo`).

Dimensions: T tokens of a row, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kernels import Mask

_GRADIENT_ITEMSIZE = 4


class PassBytes(NamedTuple):
    """Bytes of one call on one rank."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def count_missing_keys(
    mask: Mask,
    token_order: Int[np.ndarray, " T"],
    num_ranks: int,
    segment_ids: Int[np.ndarray, " T"] | None = None,
    positions: Int[np.ndarray, " T"] | None = None,
) -> Int[np.ndarray, " R"]:
    """The number of keys on other ranks that each rank's queries attend to.

    Args:
      mask: its rows are intervals.
      token_order: as `kernels.context.shard_sequence` returns it; rank r holds `token_order[r·T/R : (r + 1)·T/R]`.
      num_ranks: R.
      segment_ids: document of each token of the sequence, each document in one span; None: one document.
      positions: the mask is evaluated on them; counting up by one in each document; None: indices in the sequence.

    Raises:
      ValueError: the mask's rows aren't intervals.

    >>> from kernels import CausalMask
    >>> count_missing_keys(CausalMask(), np.arange(8), 4).tolist()
    [0, 2, 4, 6]
    """
    row = np.arange(len(token_order))
    positions = row if positions is None else positions
    interval = mask.row_interval(positions)
    if interval is None:
        raise ValueError(f"the rows of {mask!r} aren't intervals, so the keys that a rank needs have no closed form")
    document_first, document_stop = _documents(segment_ids, len(row))
    first, last = (np.asarray(bound, np.int64) - positions + row for bound in interval)
    first, stop = np.maximum(first, document_first), np.minimum(last + 1, document_stop)
    missing = []
    for own in token_order.reshape(num_ranks, -1):
        allowed = own[stop[own] > first[own]]
        opened = np.bincount(first[allowed], minlength=len(row) + 1)
        closed = np.bincount(stop[allowed], minlength=len(row) + 1)
        is_needed = (opened - closed).cumsum()[:-1] > 0
        is_needed[own] = False
        missing.append(int(is_needed.sum()))
    return np.array(missing)


def count_hops(segment_ids: Int[np.ndarray, " T"], num_ranks: int) -> int:
    """The greatest number of ranks whose keys one rank needs, itself included, for contiguous sharding.

    Args:
      segment_ids: document of each token, each document in one run.
      num_ranks: R.

    >>> count_hops(np.array([5, 5, 4, 4, 4, 4, 3, 3]), num_ranks=4)
    2
    """
    tokens_per_rank = len(segment_ids) // num_ranks
    begins, _ = _documents(segment_ids, len(segment_ids))
    return 1 + int((np.arange(num_ranks) - begins[::tokens_per_rank] // tokens_per_rank).max())


def least_bytes(num_missing: float, num_kv_heads: int, head_dim: int, itemsize: int) -> PassBytes:
    """The bytes of missing keys, with their values.

    >>> least_bytes(10, num_kv_heads=2, head_dim=4, itemsize=2)
    PassBytes(forward=320, backward=960)
    """
    numbers = num_missing * num_kv_heads * 2 * head_dim
    return PassBytes(numbers * itemsize, numbers * (itemsize + _GRADIENT_ITEMSIZE))


def _documents(
    segment_ids: Int[np.ndarray, " T"] | None, length: int
) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
    """For each token, the indices at which its document begins and stops."""
    if segment_ids is None:
        return np.zeros(length, np.int64), np.full(length, length)
    starts = np.flatnonzero(np.diff(segment_ids, prepend=segment_ids[0] - 1))
    lengths = np.diff(starts, append=length)
    return np.repeat(starts, lengths), np.repeat(starts + lengths, lengths)
