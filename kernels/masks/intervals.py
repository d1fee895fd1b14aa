"""The interval logic of masks: the tile kind of a rectangle of the attention matrix, from its corners alone.

A rectangle of query positions `q_lo..q_hi` by key/value positions `kv_lo..kv_hi` (both inclusive) is
EMPTY (no pair allowed), FULL (every pair allowed) or PARTIAL. The three tile kinds are the truth values of
Kleene's logic, ordered EMPTY < PARTIAL < FULL, so `&` is a minimum, `|` a maximum and `~` a reflection.

Everything here is elementwise and takes Python integers, NumPy arrays and traced JAX arrays alike.

Positions are int32 on devices, from 0 to `LAST_POSITION`. A mask's width may be any Python integer: `Band` drops the
bounds that no position can break, and the comparisons below don't wrap around for the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Integers = Any  # an int, a NumPy or a JAX array of integers

LAST_POSITION = (1 << 31) - 1
"""The highest position of a token: positions are int32 on devices."""
FIRST_POSITION = -(1 << 30)
"""The lowest: a mask's reach from there stays within int32."""
# The first key of a row without a bound below: the lowest int32 but one. The lowest stands for keys that aren't there:
# no interval holds it.
_FIRST = -LAST_POSITION
# Less than any difference of two int32: a width of which no pair of positions is within reach.
_OUT_OF_REACH = -(1 << 32)


class TileKind(enum.IntEnum):
    """Which pairs of a rectangle of the attention matrix are allowed: none, some or all."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


def array_namespace(*arrays):
    """`jax.numpy` if any argument is a JAX array (traced or not), else `numpy`."""
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def tile_kind(nonempty, full):
    """The tile kind of a rectangle from two truth values (scalars or arrays)."""
    if array_namespace(nonempty, full) is np:
        return nonempty * 1 + (nonempty & full) * 1
    # JAX multiplies no truth value by a number under jax_numpy_dtype_promotion="strict".
    return jnp.where(nonempty, jnp.where(full, 2, 1), 0)


def kleene_and(a, b):
    """Tile kind of the intersection: exact for FULL; an empty intersection of two PARTIALs is answered PARTIAL."""
    return array_namespace(a, b).minimum(a, b)


def kleene_or(a, b):
    """Tile kind of the union: exact for EMPTY; a full union of two PARTIALs is answered PARTIAL."""
    return array_namespace(a, b).maximum(a, b)


def kleene_not(a):
    """Tile kind of the complement, exact."""
    return 2 - a


def at_most(a: Integers, b: Integers, distance: int) -> Any:
    """a ≤ b + distance, elementwise, for any integer `distance`.

    Small distances cost one addition and one comparison: the distance is taken off the side where that makes it
    smaller, so nothing from 0 to the type's end wraps around. Larger ones, of more than half of what the type holds,
    cost a minimum or a maximum more, and wrap around nowhere.
    """
    a, b = _of_one_type(a, b)
    if distance > 0:
        return b >= (a - distance if _is_small(a, distance) else shifted(a, -distance))
    if _is_small(b, -distance):
        return a <= b + distance
    # Held at the type's lowest number, nothing is less than it, but something may equal it.
    return a < shifted(b, distance + 1)


def shifted(position: Integers, distance: int) -> Any:
    """position + distance, clamped to the numbers that the position's type can hold."""
    if isinstance(position, int):
        return position + distance
    xp, info = array_namespace(position), np.iinfo(position.dtype)
    # The amount may be more than the type holds, so it is added in two steps.
    amount = min(abs(distance), info.max - info.min, 2 * info.max)
    half = amount // 2
    if distance > 0:
        return xp.minimum(position, info.max - amount) + half + (amount - half)
    return xp.maximum(position, info.min + amount) - half - (amount - half)


def chunk_start(position: Integers, size: int) -> Any:
    """The first position of the chunk that a position lies in."""
    # A remainder and no quotient: Mosaic lowers integer division only where it knows the TPU it compiles for.
    return position - position % size


def _is_small(position: Integers, distance: int) -> bool:
    """True if `position - distance` can't wrap around, for a distance of at least 0."""
    if isinstance(position, int):
        return True
    info = np.iinfo(position.dtype)
    return info.min < 0 and distance <= info.max // 2


def _of_one_type(a: Integers, b: Integers) -> tuple[Any, Any]:
    """Both as Python integers, as NumPy or as JAX arrays, so that neither is cut to the other's type unseen."""
    xp = array_namespace(a, b)
    if xp is np and isinstance(a, int) and isinstance(b, int):
        return a, b
    kind = jax.Array if xp is jnp else (np.ndarray, np.generic)
    a, b = (x if isinstance(x, kind) else xp.asarray(x) for x in (a, b))
    return a, b


def _at_most_constant(position: Integers, constant: int) -> Any:
    """The lesser of a position and any integer, which is clamped to the numbers that the position's type can hold."""
    if isinstance(position, int):
        return min(position, constant)
    info = np.iinfo(position.dtype)
    return array_namespace(position).minimum(position, max(info.min, min(constant, info.max)))


def _within_reach(width: int | None) -> int | None:
    """A width as a band keeps it: None if all pairs of positions are within it, `_OUT_OF_REACH` or more otherwise."""
    return None if width is None or width >= LAST_POSITION else max(width, _OUT_OF_REACH)


def tightest(*bounds: int | None) -> int | None:
    """The tightest of some bounds, where None is no bound."""
    return min((bound for bound in bounds if bound is not None), default=None)


@dataclass(frozen=True)
class Band:
    """Masks whose rows are intervals: row q allows kv in [lower(q), upper(q)], both non-decreasing in q.

    lower(q) = max(q - left, start of q's chunk for each chunk size), upper(q) = min(q + right, kv_stop - 1);
    None means no such bound. Bands are closed under intersection. Because both bounds are non-decreasing
    and `upper` rises by at most one per row, the corners of a rectangle decide its kind.

    Any integer may be given. A bound that no position up to `LAST_POSITION` can break becomes None, so bands that allow
    the same pairs in that way are equal, and what is kept is a little wider than int32 at most.
    """

    left: int | None = None
    right: int | None = None
    kv_stop: int | None = None
    chunk_sizes: tuple[int, ...] = ()

    def __post_init__(self):
        stop = None if self.kv_stop is None or self.kv_stop > LAST_POSITION else self.kv_stop
        object.__setattr__(self, "left", _within_reach(self.left))
        object.__setattr__(self, "right", _within_reach(self.right))
        object.__setattr__(self, "kv_stop", stop)
        object.__setattr__(self, "chunk_sizes", tuple(size for size in self.chunk_sizes if size <= LAST_POSITION))

    def __and__(self, other: Band) -> Band:
        return Band(
            left=tightest(self.left, other.left),
            right=tightest(self.right, other.right),
            kv_stop=tightest(self.kv_stop, other.kv_stop),
            chunk_sizes=tuple(sorted({*self.chunk_sizes, *other.chunk_sizes})),
        )

    @property
    def unbounded_below(self) -> bool:
        """True if every row starts at the first key."""
        return self.left is None and not self.chunk_sizes

    @property
    def translation_invariant(self) -> bool:
        """True if the band depends on kv − q alone."""
        return self.kv_stop is None and not self.chunk_sizes

    @property
    def lookback(self) -> int | None:
        """The greatest distance from a query back to its first key; None if there is no bound."""
        left = None if self.left is None else max(self.left, 0)
        return tightest(left, *(size - 1 for size in self.chunk_sizes))

    def interval(self, q_pos: Integers) -> tuple[Any, Any]:
        """(first, last) key of each row, inclusive: int32 has no number past the last. See `Mask.row_interval`."""
        xp = array_namespace(q_pos)
        first, last = xp.full_like(q_pos, _FIRST), xp.full_like(q_pos, LAST_POSITION)
        if self.right is not None:
            last = xp.minimum(last, shifted(q_pos, self.right))
        if self.kv_stop is not None:
            last = xp.minimum(last, self.kv_stop - 1)
        if self.left is not None:
            first = xp.maximum(first, shifted(q_pos, -self.left))
            if self.left < 0:
                # Rows whose first key would stand past the last position are empty.
                last = xp.where(at_most(q_pos, LAST_POSITION, self.left), last, _FIRST - 1)
        for size in self.chunk_sizes:
            first = xp.maximum(first, chunk_start(q_pos, size))
        return first, last

    @property
    def exact(self) -> bool:
        """True if `classify` is exact for every rectangle.

        A chunk whose first rows look only at keys before it (`right < 0`) has empty rows at a period that
        the corners of a rectangle don't show; such a rectangle may be answered PARTIAL though it is EMPTY.
        """
        return not self.chunk_sizes or self.right is None or self.right >= 0

    def classify(self, q_lo: Integers, q_hi: Integers, kv_lo: Integers, kv_hi: Integers):
        """Tile kind of the rectangle, elementwise over broadcast integers. See `Mask.classify`."""
        never = self.left is not None and self.right is not None and self.left + self.right < 0

        # Rows past the last one whose interval isn't empty allow nothing: leave them out.
        last_row = q_hi
        if self.kv_stop is not None:
            if self.left is not None:
                last_row = _at_most_constant(last_row, self.kv_stop - 1 + self.left)
            for size in self.chunk_sizes:
                last_row = _at_most_constant(last_row, -(-self.kv_stop // size) * size - 1)

        nonempty = (q_lo <= last_row) & (not never)
        nonempty = nonempty & self._lower_reaches(q_lo, kv_hi) & self._upper_reaches(last_row, kv_lo)
        full = self._lower_reaches(q_hi, kv_lo) & self._upper_reaches(q_lo, kv_hi)
        return tile_kind(nonempty, full)

    def _lower_reaches(self, q, kv):
        """lower(q) <= kv."""
        reaches = kv == kv
        if self.left is not None:
            reaches = reaches & at_most(q, kv, self.left)
        for size in self.chunk_sizes:
            reaches = reaches & (chunk_start(q, size) <= kv)
        return reaches

    def _upper_reaches(self, q, kv):
        """upper(q) >= kv."""
        reaches = kv == kv
        if self.right is not None:
            reaches = reaches & at_most(kv, q, self.right)
        if self.kv_stop is not None:
            reaches = reaches & (kv < self.kv_stop)
        return reaches
