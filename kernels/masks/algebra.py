"""The mask algebra: the class `Mask`, its questions, and how masks combine.

A mask is a frozen, hashable, shape-free description of which (query position, key/value position) pairs may attend:
never an array, never T×T. It answers two questions, from which every other answer follows:

- `mask(q_pos, kv_pos)`: allowed or not, elementwise over broadcast integer arrays;
- `mask.classify(q_lo, q_hi, kv_lo, kv_hi)`: the tile kind of a whole rectangle, in closed form.

Backends, layers and the trainer ask methods of `Mask`, and never which class a mask is.

Masks combine with `&`, `|` and `~`. The names follow JAX's splash attention masks.

Positions are integers from 0 to 2³¹ − 1, int32 on devices. (Negative ones down to −2³⁰ are evaluated, too.) A mask's
widths may be any integers: a width that no position can reach is no bound, as None is.

>>> from kernels import CausalMask, LocalMask, TileKind
>>> sliding_window = CausalMask() & LocalMask(1023, 0)
>>> sliding_window(q_pos=2000, kv_pos=1500)
True
>>> sliding_window.classify(0, 127, 128, 255) == TileKind.EMPTY
True
>>> sliding_window.lookback, sliding_window.looks_ahead
(1023, False)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels.masks.drawing import block_map
from kernels.masks.intervals import (
    LAST_POSITION,
    Band,
    Integers,
    TileKind,
    array_namespace,
    kleene_and,
    kleene_not,
    kleene_or,
    tightest,
)

NO_BIAS = (
    "the kernels take no bias, a T×T array of numbers. Put what it forbids into a mask such as CausalMask() & "
    "LocalMask(1023, 0), and padding and documents into segment ids; what it only weighs can't be served"
)
_logger = logging.getLogger(__name__)

_PAIRS_PER_EVALUATION = 1 << 22
_PAIRS_WORTH_A_WARNING = 1 << 30


class Mask:
    """Base of all masks. See the module's docstring."""

    # The operator that combines the mask's parts; None: it has none, or one for each head.
    operator: Literal["&", "|", "~"] | None = None

    def __call__(self, q_pos: Integers, kv_pos: Integers) -> Any:
        """Evaluates the mask: True for each pair that may attend.

        Args:
          q_pos: query positions, integers of any shape.
          kv_pos: key/value positions, integers that broadcast against `q_pos`.

        Returns:
          Booleans of the broadcast shape, NumPy for NumPy arguments and JAX for JAX ones. A
          `MultiHeadMask` puts a leading dimension of heads before it.
        """
        raise NotImplementedError

    def classify(self, q_lo: Integers, q_hi: Integers, kv_lo: Integers, kv_hi: Integers) -> Any:
        """The tile kind of rectangles of the attention matrix, in closed form.

        Args:
          q_lo, q_hi: lowest and highest query position of each rectangle, inclusive.
          kv_lo, kv_hi: lowest and highest key/value position, inclusive. All four broadcast.

        Returns:
          `TileKind` values as integers of the broadcast shape. EMPTY and FULL are always true; a
          rectangle answered PARTIAL is certainly mixed only if the mask is `exact`.
        """
        corners = (q_lo, q_hi, kv_lo, kv_hi)
        if self.band is not None:
            return self.band.classify(*corners)
        return array_namespace(*corners).full(np.broadcast_shapes(*map(np.shape, corners)), int(TileKind.PARTIAL))

    @property
    def band(self) -> Band | None:
        """The closed form that the answers below come from, where one `Band` is the whole mask.

        For the masks of this package alone: everybody else asks the methods below.
        """
        return None

    @property
    def exact(self) -> bool:
        """True if `classify` answers PARTIAL only for rectangles that are mixed."""
        return self.band is not None and self.band.exact

    @property
    def translation_invariant(self) -> bool:
        """True if adding one constant to query and key/value positions changes nothing."""
        if self.parts:
            return all(part.translation_invariant for part in self.parts)
        return self.band is not None and self.band.translation_invariant

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that this one combines; empty for a mask that stands alone."""
        return tuple(value for value in vars(self).values() if isinstance(value, Mask)) if self.operator else ()

    def is_deeper_than(self, depth: int) -> bool:
        """True if a composition has more than `depth` levels of `&`, `|` and `~`."""
        level: list[Mask] = [self]
        for _ in range(depth + 1):
            level = [part for mask in level for part in mask.parts]
        return bool(level)

    @property
    def num_heads(self) -> int | None:
        """Number of heads of a mask that differs between heads; None if the mask is the same for all heads."""
        return None

    def for_each_head(self, num_heads: int) -> tuple[Mask, ...]:
        """The mask of each of `num_heads` query heads, in their order.

        Raises:
          ValueError: the mask is for another number of heads.
        """
        return (self,) * num_heads

    def distinct_heads(self, num_heads: int) -> dict[Mask, list[int]]:
        """The distinct masks of `num_heads` query heads, and the heads that share each."""
        heads: dict[Mask, list[int]] = {}
        for head, mask in enumerate(self.for_each_head(num_heads)):
            heads.setdefault(mask, []).append(head)
        return heads

    def row_interval(self, q_pos: Integers) -> tuple[Any, Any] | None:
        """The keys that each query may attend to, where these are one interval.

        Args:
          q_pos: query positions, int32 in a NumPy or a JAX array of any shape.

        Returns:
          (first, last), inclusive, of `q_pos`'s shape and namespace, or None if the mask's structure doesn't show
          that each query allows one interval. An empty interval has `last < first`; `first` may lie below 0. `first`
          never falls as the position rises, and `last` falls only where all later intervals are empty.
        """
        return None if self.band is None else self.band.interval(q_pos)

    @property
    def has_row_intervals(self) -> bool:
        """True if `row_interval` has an answer."""
        return self.row_interval(np.zeros(1, np.int32)) is not None

    @property
    def allows_all(self) -> bool:
        """True if every query may attend to every key."""
        return self.band == Band()

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """(left, right) if the mask allows just `-left ≤ kv - q ≤ right`, where None is no bound; else None.

        >>> from kernels import CausalMask, LocalMask, PrefixMask
        >>> (CausalMask() & LocalMask(1023, None)).window, CausalMask().window, PrefixMask(5).window
        ((1023, 0), (None, 0), None)
        """
        band = self.band
        if band is None or band != Band(left=band.left, right=band.right):
            return None
        return band.left, band.right

    @property
    def scheduled_window(self) -> Any:  # its class's module imports this one
        """The mask's `ScheduledWindow`, whose width grows over a training run; None: it has none.

        Raises:
          ValueError: there are two, or it isn't combined by `&` alone, so that to narrow it isn't to narrow the mask.
        """
        windows = [window for part in self.parts if (window := part.scheduled_window) is not None]
        if windows and (self.operator != "&" or len(windows) > 1):
            raise ValueError(f"{self!r}: a ScheduledWindow combines with other masks by & alone, and with no other one")
        return windows[0] if windows else None

    @property
    def causal_chunk_size(self) -> int | None:
        """The size of the chunks if the mask is causal within chunks and nothing else."""
        sizes = () if self.band is None else self.band.chunk_sizes
        return sizes[0] if len(sizes) == 1 and self.band == Band(right=0, chunk_sizes=sizes) else None

    @property
    def same_keys_for_all_queries(self) -> bool:
        """True if the mask's structure shows that all queries may attend to the same keys."""
        return self.band is not None and self.band == Band(kv_stop=self.band.kv_stop)

    @property
    def lookback(self) -> int | None:
        """The greatest distance that a query may look back; None if there is no bound, or none is known."""
        return None if self.band is None else self.band.lookback

    @property
    def looks_ahead(self) -> bool:
        """True if a query may see a key at a later position; True also where the structure doesn't show it."""
        return self.band is None or self.band.right is None or self.band.right > 0

    @property
    def needs_lookup(self) -> bool:
        """True if evaluating the mask looks positions up in arrays, which a kernel can't do."""
        return any(part.needs_lookup for part in self.parts)

    @property
    def largest_parameter(self) -> int:
        """The largest integer (or array side) in the mask's definition: the length at which its shape shows.

        Integers that no position can reach show nowhere, and don't count.
        """
        values = [part.largest_parameter for part in self.parts] or list(vars(self).values())
        return max([1, *(abs(value) for value in values if isinstance(value, int) and abs(value) < LAST_POSITION)])

    def check_functions(self) -> None:
        """Checks that the mask's functions can be evaluated on devices.

        Raises:
          ValueError: one can't, with the reason and the remedy.
        """
        for part in self.parts:
            part.check_functions()

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """Checks that the mask is defined for sequences of these lengths, whose positions count from 0.

        Raises:
          ValueError: an array has another shape.
        """
        for part in self.parts:
            part.check_lengths(q_len, kv_len)

    def state(self) -> Hashable | None:
        """The part of the mask that may change between calls, for a cache's key; None if it can't be known."""
        states = tuple(part.state() for part in self.parts)
        return None if None in states else states

    def evaluate(self, q_pos: np.ndarray, kv_pos: np.ndarray) -> np.ndarray:
        """The pairs as a NumPy array, also while JAX traces and where a function is written with `jax.numpy`."""
        with jax.ensure_compile_time_eval():
            return np.asarray(self(q_pos, kv_pos))

    def count_allowed(
        self, q_lo: np.ndarray, q_hi: np.ndarray, kv_lo: np.ndarray, kv_hi: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Allowed pairs and all pairs of rectangles of positions `[n]`, by evaluating one head's mask on each pair."""
        counts = np.zeros(len(q_lo), np.int64)
        areas = (q_hi - q_lo + 1) * (kv_hi - kv_lo + 1)
        if not len(q_lo):
            return counts, areas
        if areas.sum() >= _PAIRS_WORTH_A_WARNING:
            _logger.warning("%r has no exact closed form: evaluating it on %.1e pairs", self, areas.sum())
        height, width = int((q_hi - q_lo).max()) + 1, int((kv_hi - kv_lo).max()) + 1
        num_rows = max(1, min(height, _PAIRS_PER_EVALUATION // width))
        num_rectangles = max(1, _PAIRS_PER_EVALUATION // (num_rows * width))
        for begin in range(0, len(q_lo), num_rectangles):
            part = slice(begin, begin + num_rectangles)
            kv = (kv_lo[part, None] + np.arange(width))[:, None, :]
            kv_inside, kv = kv <= kv_hi[part, None, None], np.minimum(kv, kv_hi[part, None, None])
            for row in range(0, height, num_rows):
                q = (q_lo[part, None] + np.arange(row, min(row + num_rows, height)))[:, :, None]
                # Positions past a rectangle's end are moved to its last one, where any mask is defined.
                q_inside, q = q <= q_hi[part, None, None], np.minimum(q, q_hi[part, None, None])
                counts[part] += np.sum(self.evaluate(q, kv) & q_inside & kv_inside, axis=(1, 2))
        return counts, areas

    def __and__(self, other: Mask) -> Mask:
        return _combine(AndMask, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine(OrMask, self, other)

    def __invert__(self) -> Mask:
        return NotMask(self)

    def __bool__(self):
        raise TypeError("a mask has no truth value: use & instead of and, | instead of or, ~ instead of not")

    def __str__(self) -> str:
        return f"{self!r}\n{block_map(self)}"


def require_mask(mask: object) -> None:
    """Raises ValueError for anything but a mask."""
    if isinstance(mask, Mask):
        return
    got, remedy = type(mask).__name__, "wrap a dense boolean array in NumpyMask"
    if isinstance(mask, type):
        got, remedy = f"the class {mask.__name__}", f"make one of it: {mask.__name__}(…)"
    elif is_bias(mask):
        remedy = f"an array of floats is a bias: {NO_BIAS}"
    raise ValueError(f"mask must be a kernels.Mask such as CausalMask(), got {got}; {remedy}")


def is_bias(array: object) -> bool:
    """True if an array that was given as a mask holds floats, as a bias does."""
    return jnp.issubdtype(getattr(array, "dtype", bool), jnp.floating)


def _combine(operator: type[AndMask] | type[OrMask], a: Mask, b: Mask) -> Mask:
    if not isinstance(a, Mask) or not isinstance(b, Mask):
        return NotImplemented
    # Per-head masks stay outermost, so that backends need to look for them in one place only.
    counts = [mask.num_heads for mask in (a, b) if mask.num_heads is not None]
    if not counts:
        return operator(a, b)
    if len(set(counts)) > 1:
        raise ValueError(f"cannot combine masks for {counts[0]} and {counts[1]} heads; give both one mask per head")
    heads_a, heads_b = (mask.for_each_head(counts[0]) for mask in (a, b))
    return MultiHeadMask([_combine(operator, x, y) for x, y in zip(heads_a, heads_b, strict=True)])


@dataclass(frozen=True)
class AndMask(Mask):
    """Allows what both masks allow; written `a & b`."""

    operator = "&"
    a: Mask
    b: Mask

    def __call__(self, q_pos, kv_pos):
        return self.a(q_pos, kv_pos) & self.b(q_pos, kv_pos)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        if self.band is not None:
            return self.band.classify(q_lo, q_hi, kv_lo, kv_hi)
        return kleene_and(*(part.classify(q_lo, q_hi, kv_lo, kv_hi) for part in self.parts))

    @functools.cached_property
    def band(self) -> Band | None:
        return self.a.band & self.b.band if self.a.band is not None and self.b.band is not None else None

    def row_interval(self, q_pos):
        if self.band is not None:
            return self.band.interval(q_pos)
        a, b = self.a.row_interval(q_pos), self.b.row_interval(q_pos)
        xp = array_namespace(q_pos)
        return None if a is None or b is None else (xp.maximum(a[0], b[0]), xp.minimum(a[1], b[1]))

    @property
    def lookback(self) -> int | None:
        return tightest(self.a.lookback, self.b.lookback)

    @property
    def looks_ahead(self) -> bool:
        return self.a.looks_ahead and self.b.looks_ahead

    def __repr__(self):
        a = f"({self.a!r})" if isinstance(self.a, OrMask) else repr(self.a)
        b = f"({self.b!r})" if isinstance(self.b, AndMask | OrMask) else repr(self.b)
        return f"{a} & {b}"


@dataclass(frozen=True)
class OrMask(Mask):
    """Allows what either mask allows; written `a | b`."""

    operator = "|"
    a: Mask
    b: Mask

    def __call__(self, q_pos, kv_pos):
        return self.a(q_pos, kv_pos) | self.b(q_pos, kv_pos)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        return kleene_or(*(part.classify(q_lo, q_hi, kv_lo, kv_hi) for part in self.parts))

    @property
    def exact(self) -> bool:
        # Rows that all start at the first key are nested, so a full union has a full member.
        return self._rows_are_nested and self.a.exact and self.b.exact

    @functools.cached_property
    def _rows_are_nested(self) -> bool:
        return all(part.band is not None and part.band.unbounded_below for part in self.parts)

    def row_interval(self, q_pos):
        a, b = self.a.row_interval(q_pos), self.b.row_interval(q_pos)
        # Two intervals that both start at the first key make one; others may have a gap between them.
        if a is None or b is None or not self._rows_are_nested:
            return None
        return a[0], array_namespace(q_pos).maximum(a[1], b[1])

    @property
    def lookback(self) -> int | None:
        return _longest(part.lookback for part in self.parts)

    @property
    def looks_ahead(self) -> bool:
        return self.a.looks_ahead or self.b.looks_ahead

    def __repr__(self):
        return f"{self.a!r} | " + (f"({self.b!r})" if isinstance(self.b, OrMask) else repr(self.b))


@dataclass(frozen=True)
class NotMask(Mask):
    """Allows what the mask doesn't; written `~a`."""

    operator = "~"
    a: Mask

    def __call__(self, q_pos, kv_pos):
        return self.a(q_pos, kv_pos) ^ True

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        return kleene_not(self.a.classify(q_lo, q_hi, kv_lo, kv_hi))

    @property
    def exact(self) -> bool:
        return self.a.exact

    def __repr__(self):
        return f"~({self.a!r})" if isinstance(self.a, AndMask | OrMask) else f"~{self.a!r}"


@dataclass(frozen=True)
class MultiHeadMask(Mask):
    """One mask for each query head, in the order of the heads.

    `&`, `|` and `~` act on each head, so this is always the outermost mask.
    """

    masks: tuple[Mask, ...]

    def __init__(self, masks: Iterable[Mask]):
        if isinstance(masks, Mask):
            raise ValueError(f"MultiHeadMask takes a list with one mask per head, got {masks!r}; {masks!r} is for all")
        masks = tuple(masks)
        if not masks:
            raise ValueError("MultiHeadMask needs at least one mask, got none")
        for mask in masks:
            if not isinstance(mask, Mask) or mask.num_heads is not None:
                raise ValueError(f"MultiHeadMask takes one single-head mask per head, got {mask!r}")
        object.__setattr__(self, "masks", masks)

    @property
    def num_heads(self) -> int:
        return len(self.masks)

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def for_each_head(self, num_heads: int) -> tuple[Mask, ...]:
        if num_heads != self.num_heads:
            raise ValueError(
                f"MultiHeadMask has {self.num_heads} masks for num_heads={num_heads} query heads; give one per head"
            )
        return self.masks

    @property
    def has_row_intervals(self) -> bool:
        return all(mask.has_row_intervals for mask in self.masks)

    @property
    def lookback(self) -> int | None:
        return _longest(mask.lookback for mask in self.masks)

    @property
    def looks_ahead(self) -> bool:
        return any(mask.looks_ahead for mask in self.masks)

    def __call__(self, q_pos, kv_pos):
        per_head = [mask(q_pos, kv_pos) for mask in self.masks]
        return array_namespace(*per_head).stack(per_head)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        per_head = [mask.classify(q_lo, q_hi, kv_lo, kv_hi) for mask in self.masks]
        return array_namespace(*per_head).stack(per_head)

    def __invert__(self) -> MultiHeadMask:
        return MultiHeadMask([~mask for mask in self.masks])

    @property
    def exact(self) -> bool:
        return all(mask.exact for mask in self.masks)

    def __repr__(self):
        return f"MultiHeadMask([{', '.join(map(repr, self.masks))}])"


def _longest(lookbacks: Iterable[int | None]) -> int | None:
    """The longest of some look-backs, where None has no bound."""
    bounds = list(lookbacks)
    return None if None in bounds else max(bounds)  # type: ignore[type-var]
