"""Attention masks as small algebraic objects: never an array, never T×T.

A mask is a frozen, hashable, shape-free description of which (query position, key/value position) pairs
may attend. It answers two questions, and these are all that a backend may ask:

- `mask(q_pos, kv_pos)`: allowed or not, elementwise over broadcast integer arrays;
- `mask.classify(q_lo, q_hi, kv_lo, kv_hi)`: what a whole rectangle holds, in closed form.

Masks combine with `&`, `|` and `~`. The names follow JAX's splash attention masks.

Positions are integers from 0 to 2³¹ − 1, int32 on devices. (Negative ones down to −2³⁰ are evaluated, too.) A mask's
widths may be any integers: a width that no position can reach is no bound, as None is.

>>> sliding_window = CausalMask() & LocalMask(1023, 0)
>>> sliding_window(q_pos=2000, kv_pos=1500)
True
>>> sliding_window.classify(0, 127, 128, 255) == TileKind.EMPTY
True
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from kernels.intervals import (
    LAST_POSITION,
    Band,
    Integers,
    TileKind,
    array_namespace,
    at_most,
    chunk_start,
    kleene_and,
    kleene_not,
    kleene_or,
)
from kernels.position_functions import FunctionTrace, booleans, identity, tile_kinds, trace


class Mask:
    """Base of all masks. See the module's docstring."""

    def __call__(self, q_pos: Integers, kv_pos: Integers) -> Any:
        """Whether each pair may attend.

        Args:
          q_pos: query positions, integers of any shape.
          kv_pos: key/value positions, integers that broadcast against `q_pos`.

        Returns:
          Booleans of the broadcast shape, NumPy for NumPy arguments and JAX for JAX ones. A
          `MultiHeadMask` puts a leading dimension of heads before it.
        """
        raise NotImplementedError

    def classify(self, q_lo: Integers, q_hi: Integers, kv_lo: Integers, kv_hi: Integers) -> Any:
        """What rectangles of the attention matrix hold, in closed form.

        Args:
          q_lo, q_hi: lowest and highest query position of each rectangle, inclusive.
          kv_lo, kv_hi: lowest and highest key/value position, inclusive. All four broadcast.

        Returns:
          `TileKind` values as integers of the broadcast shape. EMPTY and FULL are always true; a
          rectangle answered PARTIAL is certainly mixed only if the mask is `exact`.
        """
        if self.band is None:
            return _unknown(q_lo, q_hi, kv_lo, kv_hi)
        return self.band.classify(q_lo, q_hi, kv_lo, kv_hi)

    @property
    def band(self) -> Band | None:
        """The mask's rows as intervals, or None if they aren't such (see `Band`)."""
        return None

    @property
    def exact(self) -> bool:
        """Whether `classify` answers PARTIAL only for rectangles that are mixed."""
        return self.band is not None and self.band.exact

    @property
    def translation_invariant(self) -> bool:
        """Whether adding one constant to query and key/value positions changes nothing."""
        return self.band is not None and self.band.translation_invariant

    def __and__(self, other: Mask) -> Mask:
        return _combine(AndMask, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine(OrMask, self, other)

    def __invert__(self) -> Mask:
        return NotMask(self)

    def __bool__(self):
        raise TypeError("a mask has no truth value: use & instead of and, | instead of or, ~ instead of not")

    def __str__(self) -> str:
        from kernels.mask_drawing import block_map

        return f"{self!r}\n{block_map(self)}"


def _unknown(*corners: Integers) -> Any:
    """PARTIAL for every rectangle, the answer of a mask that has no closed form."""
    return array_namespace(*corners).full(np.broadcast_shapes(*map(np.shape, corners)), int(TileKind.PARTIAL))


def _combine(operator: type[AndMask] | type[OrMask], a: Mask, b: Mask) -> Mask:
    if not isinstance(a, Mask) or not isinstance(b, Mask):
        return NotImplemented
    # Per-head masks stay outermost, so that backends need to look for them in one place only.
    counts = [mask.num_heads for mask in (a, b) if isinstance(mask, MultiHeadMask)]
    if not counts:
        return operator(a, b)
    if len(set(counts)) > 1:
        raise ValueError(f"cannot combine masks for {counts[0]} and {counts[1]} heads; give both one mask per head")
    count = counts[0]
    heads_a, heads_b = (mask.masks if isinstance(mask, MultiHeadMask) else (mask,) * count for mask in (a, b))
    return MultiHeadMask([_combine(operator, x, y) for x, y in zip(heads_a, heads_b, strict=True)])


def _require_int(owner: Mask, name: str, *, minimum: int | None = None, optional: bool = False) -> None:
    value = getattr(owner, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        kind = "an integer or None" if optional else "an integer"
        raise ValueError(f"{type(owner).__name__}.{name} must be {kind}, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{type(owner).__name__}.{name}={value} must be at least {minimum}")
    object.__setattr__(owner, name, int(value))


@dataclass(frozen=True)
class FullMask(Mask):
    """Every pair is allowed."""

    def __call__(self, q_pos, kv_pos):
        return (q_pos == q_pos) & (kv_pos == kv_pos)

    @property
    def band(self) -> Band:
        return Band()


@dataclass(frozen=True)
class CausalMask(Mask):
    """Allows kv ≤ q + offset."""

    offset: int = 0

    def __post_init__(self):
        _require_int(self, "offset")

    def __call__(self, q_pos, kv_pos):
        right = self.band.right
        return FullMask()(q_pos, kv_pos) if right is None else at_most(kv_pos, q_pos, right)

    @property
    def band(self) -> Band:
        return Band(right=self.offset)


@dataclass(frozen=True)
class LocalMask(Mask):
    """Allows −left ≤ kv − q ≤ right; None leaves that side unbounded.

    A causal window over the last W tokens, the token itself among them, is `LocalMask(W - 1, 0)`.
    """

    left: int | None
    right: int | None

    def __post_init__(self):
        _require_int(self, "left", optional=True)
        _require_int(self, "right", optional=True)

    def __call__(self, q_pos, kv_pos):
        allowed, band = FullMask()(q_pos, kv_pos), self.band
        if band.left is not None:
            allowed = allowed & at_most(q_pos, kv_pos, band.left)
        if band.right is not None:
            allowed = allowed & at_most(kv_pos, q_pos, band.right)
        return allowed

    @property
    def band(self) -> Band:
        return Band(left=self.left, right=self.right)


@dataclass(frozen=True)
class ChunkedCausalMask(Mask):
    """Allows kv ≤ q within one chunk of `chunk_size` positions (Llama 4's local attention)."""

    chunk_size: int

    def __post_init__(self):
        _require_int(self, "chunk_size", minimum=1)

    def __call__(self, q_pos, kv_pos):
        allowed = kv_pos <= q_pos
        for size in self.band.chunk_sizes:
            allowed = allowed & (kv_pos >= chunk_start(q_pos, size))
        return allowed

    @property
    def band(self) -> Band:
        return Band(right=0, chunk_sizes=(self.chunk_size,))


@dataclass(frozen=True)
class PrefixMask(Mask):
    """Allows kv < length. A prefix language model is `CausalMask() | PrefixMask(length)`."""

    length: int

    def __post_init__(self):
        _require_int(self, "length", minimum=0)

    def __call__(self, q_pos, kv_pos):
        stop = self.band.kv_stop
        return FullMask()(q_pos, kv_pos) if stop is None else (q_pos == q_pos) & (kv_pos < stop)

    @property
    def band(self) -> Band:
        return Band(kv_stop=self.length)


@dataclass(frozen=True, eq=False)
class MaskFn(Mask):
    """A mask computed by a function of the two positions.

    Two are equal if their functions are the same objects, so define these once, at module level.

    The function may capture arrays (`lambda q, kv: document[q] == document[kv]`), if these are JAX's and aren't being
    traced. Kernels can't look arrays up: `mosaic_gpu` passes such masks over, and `splash` takes their PARTIAL tiles
    as arrays, like a `NumpyMask`'s. What the function captures may change from call to call: a plan is used again only
    while the function computes the same, which its trace tells. It mustn't change between a call and its gradient, nor
    under `jax.jit`, which like for any function keeps what was captured when it compiled.

    Args:
      fn: `fn(q_pos, kv_pos) -> bool`, elementwise, written with operators or `jax.numpy`. It may ignore either.
      classify_fn: the closed form, with the arguments and result of `Mask.classify`; tiles that it calls PARTIAL
        are visited even if they hold nothing. Without it a block plan evaluates `fn` on every pair, once per plan:
        time in proportion to T².

    Raises:
      ValueError: not functions; or when evaluated, results that aren't booleans (of `classify_fn`: tile kinds), or that
        don't broadcast to the arguments' shape.
    """

    fn: Callable[[Any, Any], Any]
    classify_fn: Callable[[Any, Any, Any, Any], Any] | None = None

    def __post_init__(self):
        if not callable(self.fn):
            raise ValueError(f"MaskFn.fn must be a function of (q_pos, kv_pos), got {self.fn!r}")
        if self.classify_fn is not None and not callable(self.classify_fn):
            raise ValueError(
                f"MaskFn.classify_fn must be a function of (q_lo, q_hi, kv_lo, kv_hi) or None, got {self.classify_fn!r}"
            )

    def __eq__(self, other):
        return isinstance(other, MaskFn) and self._functions == other._functions

    def __hash__(self):
        return hash(self._functions)

    @property
    def _functions(self) -> tuple[Hashable, ...]:
        return identity(self.fn), identity(self.classify_fn)

    def __call__(self, q_pos, kv_pos):
        return booleans(self.fn(q_pos, kv_pos), q_pos, kv_pos, repr(self))

    def trace(self) -> FunctionTrace:
        """What the function computes and captures at this moment.

        Raises:
          ValueError: it can't be evaluated on devices, with the reason.
        """
        return trace(self.fn, repr(self))

    def __repr__(self):
        name = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return f"MaskFn(<{getattr(self.fn, '__module__', '?')}.{name}>)"

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        if self.classify_fn is not None:
            corners = (q_lo, q_hi, kv_lo, kv_hi)
            shape = np.broadcast_shapes(*map(np.shape, corners))
            return tile_kinds(self.classify_fn(*corners), shape, f"classify_fn of {self!r}")
        return _unknown(q_lo, q_hi, kv_lo, kv_hi)

    @property
    def exact(self) -> bool:
        return self.classify_fn is not None


@dataclass(frozen=True, eq=False)
class NumpyMask(Mask):
    """A dense boolean array `[q_len, kv_len]`, indexed by positions: the baseline that the others avoid.

    A block plan reads every element of it. Positions outside the array are not allowed to attend. Two are equal if
    their arrays are.
    """

    array: np.ndarray = field(repr=False)

    def __post_init__(self):
        array = np.array(self.array, copy=True)
        if array.ndim != 2 or array.dtype != np.bool_:
            raise ValueError(
                f"NumpyMask needs a 2-D boolean array [q_len, kv_len], got {array.dtype} of shape {array.shape}"
            )
        array.setflags(write=False)
        object.__setattr__(self, "array", array)

    @functools.cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(repr(self.array.shape).encode() + np.packbits(self.array).tobytes()).digest()

    def __eq__(self, other):
        return isinstance(other, NumpyMask) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def __repr__(self):
        return f"NumpyMask(<{self.array.shape[0]}×{self.array.shape[1]}, sha256 {self._digest.hex()[:12]}>)"

    def __call__(self, q_pos, kv_pos):
        xp = array_namespace(q_pos, kv_pos)
        q_len, kv_len = self.array.shape
        inside = (q_pos >= 0) & (q_pos < q_len) & (kv_pos >= 0) & (kv_pos < kv_len)
        return inside & xp.asarray(self.array)[xp.clip(q_pos, 0, q_len - 1), xp.clip(kv_pos, 0, kv_len - 1)]


@dataclass(frozen=True)
class AndMask(Mask):
    """Allows what both masks allow; written `a & b`."""

    a: Mask
    b: Mask

    def __call__(self, q_pos, kv_pos):
        return self.a(q_pos, kv_pos) & self.b(q_pos, kv_pos)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        corners = (q_lo, q_hi, kv_lo, kv_hi)
        if self.band is not None:
            return self.band.classify(*corners)
        return kleene_and(self.a.classify(*corners), self.b.classify(*corners))

    @functools.cached_property
    def band(self) -> Band | None:
        return self.a.band & self.b.band if self.a.band is not None and self.b.band is not None else None

    @property
    def translation_invariant(self) -> bool:
        return self.a.translation_invariant and self.b.translation_invariant

    def __repr__(self):
        a = f"({self.a!r})" if isinstance(self.a, OrMask) else repr(self.a)
        b = f"({self.b!r})" if isinstance(self.b, AndMask | OrMask) else repr(self.b)
        return f"{a} & {b}"


@dataclass(frozen=True)
class OrMask(Mask):
    """Allows what either mask allows; written `a | b`."""

    a: Mask
    b: Mask

    def __call__(self, q_pos, kv_pos):
        return self.a(q_pos, kv_pos) | self.b(q_pos, kv_pos)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        corners = (q_lo, q_hi, kv_lo, kv_hi)
        return kleene_or(self.a.classify(*corners), self.b.classify(*corners))

    @property
    def exact(self) -> bool:
        # Rows that all start at the first key are nested, so a full union has a full member.
        return all(m.band is not None and m.band.exact and m.band.unbounded_below for m in (self.a, self.b))

    @property
    def translation_invariant(self) -> bool:
        return self.a.translation_invariant and self.b.translation_invariant

    def __repr__(self):
        return f"{self.a!r} | " + (f"({self.b!r})" if isinstance(self.b, OrMask) else repr(self.b))


@dataclass(frozen=True)
class NotMask(Mask):
    """Allows what the mask doesn't; written `~a`."""

    a: Mask

    def __call__(self, q_pos, kv_pos):
        return self.a(q_pos, kv_pos) ^ True

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        return kleene_not(self.a.classify(q_lo, q_hi, kv_lo, kv_hi))

    @property
    def exact(self) -> bool:
        return self.a.exact

    @property
    def translation_invariant(self) -> bool:
        return self.a.translation_invariant

    def __repr__(self):
        return f"~({self.a!r})" if isinstance(self.a, AndMask | OrMask) else f"~{self.a!r}"


@dataclass(frozen=True)
class MultiHeadMask(Mask):
    """One mask for each query head, in the order of the heads.

    `&`, `|` and `~` act on each head, so this is always the outermost mask.
    """

    masks: tuple[Mask, ...]

    def __init__(self, masks: Iterable[Mask]):
        masks = tuple(masks)
        if not masks:
            raise ValueError("MultiHeadMask needs at least one mask, got none")
        for mask in masks:
            if not isinstance(mask, Mask) or isinstance(mask, MultiHeadMask):
                raise ValueError(f"MultiHeadMask takes one single-head mask per head, got {mask!r}")
        object.__setattr__(self, "masks", masks)

    @property
    def num_heads(self) -> int:
        return len(self.masks)

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

    @property
    def translation_invariant(self) -> bool:
        return all(mask.translation_invariant for mask in self.masks)

    def __repr__(self):
        return f"MultiHeadMask([{', '.join(map(repr, self.masks))}])"


_PARSABLE = {
    mask.__name__: mask for mask in (FullMask, CausalMask, LocalMask, ChunkedCausalMask, PrefixMask, MultiHeadMask)
}


def parse_mask(text: str) -> Mask:
    """Reads a mask back from its `repr`, as the command line and `config.json` write it.

    Args:
      text: calls of the mask classes with integers or None, joined by `&`, `|`, `~` and parentheses.

    Raises:
      ValueError: for anything else, naming the part that isn't understood.

    >>> parse_mask("CausalMask() & LocalMask(1023, 0)")
    CausalMask(offset=0) & LocalMask(left=1023, right=0)
    """
    try:
        mask = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"cannot read the mask {text!r}: {error}") from None
    except (RecursionError, MemoryError):  # the latter from Python's parser
        raise ValueError(f"cannot read the mask {text[:40]!r}…: it is nested too deep") from None
    if not isinstance(mask, Mask):
        raise ValueError(f"cannot read the mask {text!r}: it is {mask!r}, not a mask such as 'CausalMask()'")
    return mask


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_evaluate(operand)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _evaluate(left) & _evaluate(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _evaluate(left) | _evaluate(right)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_evaluate(element) for element in elements]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _PARSABLE:
            named = {keyword.arg: _evaluate(keyword.value) for keyword in keywords if keyword.arg is not None}
            return _PARSABLE[name](*map(_evaluate, args), **named)
    known = ", ".join(sorted(_PARSABLE))
    raise ValueError(f"cannot read {ast.unparse(node)!r} in a mask; expected {known}, integers, None, &, | and ~")


def leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that a composition is built from."""
    parts = [getattr(mask, parameter.name) for parameter in dataclasses.fields(mask)]  # type: ignore[arg-type]
    inner = [part for value in parts for part in (value if isinstance(value, tuple) else (value,))]
    if not any(isinstance(part, Mask) for part in inner):
        yield mask
    for part in inner:
        if isinstance(part, Mask):
            yield from leaves(part)


def check_functions(mask: Mask) -> None:
    """Checks that a mask's functions can be evaluated on devices.

    Raises:
      ValueError: one can't, with the reason and the remedy.
    """
    for leaf in leaves(mask):
        if isinstance(leaf, MaskFn):
            leaf.trace()


def captures_arrays(mask: Mask) -> bool:
    """Whether a mask looks positions up in arrays that its functions capture."""
    return any(isinstance(leaf, MaskFn) and leaf.trace().captures for leaf in leaves(mask))


def state_of_functions(mask: Mask) -> Hashable | None:
    """A part of a cache's key that changes with what a mask's functions compute; None if that can't be told."""
    functions = [leaf for leaf in leaves(mask) if isinstance(leaf, MaskFn)]
    try:
        digests = tuple(function.trace().digest for function in functions)
    except ValueError:
        return None
    return None if None in digests else digests


def evaluate_on_host(mask: Mask, q_pos: np.ndarray, kv_pos: np.ndarray) -> np.ndarray:
    """A mask's pairs as a NumPy array, also while JAX traces and where a function is written with `jax.numpy`."""
    with jax.ensure_compile_time_eval():
        return np.asarray(mask(q_pos, kv_pos))


def largest_parameter(mask: Mask) -> int:
    """The largest integer (or array side) in a mask's definition: the length at which its shape shows.

    Integers that no position can reach show nowhere, and don't count.
    """
    largest = 1
    for leaf in leaves(mask):
        values = leaf.array.shape if isinstance(leaf, NumpyMask) else vars(leaf).values()
        sizes = [abs(value) for value in values if isinstance(value, int)]
        largest = max([largest, *(size for size in sizes if size < LAST_POSITION)])
    return largest
