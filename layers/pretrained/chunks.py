"""Chunks of a folder's tensors, each read at once for the shards of a parameter on this process's devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Bounds = tuple[tuple[int, int], ...]
"""A start and a stop for each dim; Python 3.11 can't hash slices."""


@dataclass(frozen=True)
class TensorChunk:
    """A box in the dims of some tensors that is read at once; each of some shards takes a part of it.

    Args:
      stacked: bounds in the stacked dims, which the shards have in common. A block of them comes from one tensor.
      first, num_blocks: which blocks, counted in the order of `stacked`.
      box: bounds in the dims of a block.
      shards: their bounds in all dims.
    """

    stacked: Bounds
    first: int
    num_blocks: int
    box: Bounds
    shards: tuple[Bounds, ...]

    def positions(self) -> Iterator[tuple[int, ...]]:
        """Positions of the chunk's blocks in the stacked dims."""
        for block in range(self.first, self.first + self.num_blocks):
            position: list[int] = []
            for start, stop in reversed(self.stacked):
                block, offset = divmod(block, stop - start)
                position.append(start + offset)
            yield tuple(reversed(position))

    def part_of(self, shard: Bounds) -> Bounds:
        """A shard's part of each block, counted from the start of the box."""
        rest = shard[len(self.stacked) :]
        return tuple(
            (max(start, low) - low, min(stop, high) - low)
            for (start, stop), (low, high) in zip(rest, self.box, strict=True)
        )

    def starts_in(self, shard: Bounds) -> tuple[int, ...]:
        """Start of `part_of(shard)` in the shard with merged stacked dims: first block, first entry of each dim."""
        rest = shard[len(self.stacked) :]
        return (self.first, *(max(0, low - start) for (start, _), (low, _) in zip(rest, self.box, strict=True)))


def find_chunks(
    shards: Iterable[Bounds], num_stacked: int, outer: int | None, itemsize: int, chunk_bytes: int
) -> Iterator[TensorChunk]:
    """Cuts shards into chunks so that no byte is read twice, where boxes allow that.

    Args:
      shards: bounds of the distinct shards of one parameter.
      num_stacked: leading dims that are spread over tensors.
      outer: the dim, counted without the stacked ones, that is outermost in the tensors. A block of more bytes than a
        chunk is cut along it. None: there is no such dim.
      itemsize: bytes of an entry.
      chunk_bytes: upper bound on a chunk's bytes, unless one entry of `outer` has more.

    >>> column_shards = [((0, 3), (0, 8), (0, 2)), ((0, 3), (0, 8), (2, 4))]
    >>> for chunk in find_chunks(column_shards, 1, 0, 1, 64):
    ...     print(chunk.first, chunk.num_blocks, chunk.box, len(chunk.shards))
    0 2 ((0, 8), (0, 4)) 2
    2 1 ((0, 8), (0, 4)) 2
    >>> [chunk.box for chunk in find_chunks([((0, 1), (0, 8), (0, 2))], 1, 0, 1, 12)]
    [((0, 6), (0, 2)), ((6, 8), (0, 2))]
    """
    for together in _read_together(shards, num_stacked, outer):
        stacked, box = together[0][:num_stacked], _hull([shard[num_stacked:] for shard in together])
        num_blocks, block_bytes = _volume(stacked), itemsize * _volume(box)
        if block_bytes <= chunk_bytes or outer is None:
            at_once = max(1, chunk_bytes // block_bytes)
            for first in range(0, num_blocks, at_once):
                yield TensorChunk(stacked, first, min(at_once, num_blocks - first), box, together)
            continue
        start, stop = box[outer]
        at_once = max(1, chunk_bytes * (stop - start) // block_bytes)
        for block in range(num_blocks):
            for low in range(start, stop, at_once):
                part = (*box[:outer], (low, min(low + at_once, stop)), *box[outer + 1 :])
                yield TensorChunk(stacked, block, 1, part, together)


def _read_together(shards: Iterable[Bounds], num_stacked: int, outer: int | None) -> list[tuple[Bounds, ...]]:
    """Shards that share their rows in the file, so that reading the rows whole serves all of them."""
    sharing: dict[tuple[Bounds, Bounds], list[Bounds]] = {}
    for shard in shards:
        rows = () if outer is None else (shard[num_stacked + outer],)
        sharing.setdefault((shard[:num_stacked], rows), []).append(shard)
    together: list[tuple[Bounds, ...]] = []
    for group in sharing.values():
        boxes = [shard[num_stacked:] for shard in group]
        # Where other processes hold what lies between them, each is read by itself.
        is_box = _volume(_hull(boxes)) == sum(map(_volume, boxes))
        together += [tuple(group)] if is_box else [(shard,) for shard in group]
    return together


def _hull(boxes: list[Bounds]) -> Bounds:
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*boxes, strict=True))


def _volume(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)
