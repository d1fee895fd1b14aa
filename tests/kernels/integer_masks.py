"""Masks evaluated in plain Python integers, by their definitions: an oracle that shares no code with `kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import kernels

LAST = 2**31 - 1


@dataclass(frozen=True)
class Spec:
    """A mask as a name and its integers, or as an operator and its parts."""

    name: str
    arguments: tuple[Any, ...] = ()

    def mask(self) -> kernels.Mask:
        """The library's mask of this description."""
        match self.name:
            case "and":
                return self.arguments[0].mask() & self.arguments[1].mask()
            case "or":
                return self.arguments[0].mask() | self.arguments[1].mask()
            case "not":
                return ~self.arguments[0].mask()
        return getattr(kernels, self.name)(*self.arguments)

    def allows(self, q: int, kv: int) -> bool:
        """Whether a pair of positions from 0 to `LAST` may attend."""
        match self.name, self.arguments:
            case "FullMask", ():
                return True
            case "CausalMask", (offset,):
                return kv <= q + offset
            case "LocalMask", (left, right):
                return (left is None or q - left <= kv) and (right is None or kv <= q + right)
            case "ChunkedCausalMask", (size,):
                return kv <= q and kv // size == q // size
            case "PrefixMask", (length,):
                return kv < length
            case "and", (a, b):
                return a.allows(q, kv) and b.allows(q, kv)
            case "or", (a, b):
                return a.allows(q, kv) or b.allows(q, kv)
            case "not", (a,):
                return not a.allows(q, kv)
        raise AssertionError(self)

    def dense(self, q_pos, kv_pos) -> np.ndarray:
        """Which pairs of some positions may attend, bool `[q, kv]`."""
        rows = [[self.allows(q, kv) for kv in map(int, kv_pos)] for q in map(int, q_pos)]
        return np.array(rows, bool).reshape(len(rows), len(kv_pos))


def spec(name: str, *arguments) -> Spec:
    """A leaf."""
    return Spec(name, arguments)


def both(a: Spec, b: Spec) -> Spec:
    return Spec("and", (a, b))


def either(a: Spec, b: Spec) -> Spec:
    return Spec("or", (a, b))


_edges = st.sampled_from([0, 2**30, 2**31, 2**32, 2**33, 2**63, 2**64, 10**30])
near_edges = st.builds(
    lambda edge, sign, offset: sign * edge + offset, _edges, st.sampled_from([-1, 1]), st.integers(-4, 4)
)
integers = near_edges | st.integers(-70, 70) | st.integers(-(2**31), 2**31) | st.integers(-(10**31), 10**31)
"""Widths over all integers: small, around the ends of integer types, between and beyond."""
_counts = integers.map(abs)

leaves = st.one_of(
    st.just(spec("FullMask")),
    st.builds(lambda offset: spec("CausalMask", offset), integers),
    st.builds(lambda left, right: spec("LocalMask", left, right), st.none() | integers, st.none() | integers),
    st.builds(lambda size: spec("ChunkedCausalMask", max(size, 1)), _counts),
    st.builds(lambda length: spec("PrefixMask", length), _counts),
)
specs = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(both, inner, inner), st.builds(either, inner, inner), st.builds(lambda a: Spec("not", (a,)), inner)
    ),
    max_leaves=4,
)

_near = st.builds(lambda edge, offset: edge + offset, st.sampled_from([0, 2**30, LAST]), st.integers(-40, 40))
positions = (_near | st.integers(0, 70) | st.integers(0, LAST)).map(lambda x: min(max(x, 0), LAST))
"""Positions of tokens: small ones, some near int32's end, and any."""

# What a call may be given: bounds that wrap around where int32 does, that no int32 holds, or that leave nothing.
UNREACHABLE = [
    spec("CausalMask", LAST),
    spec("LocalMask", 8, LAST),
    both(spec("LocalMask", LAST, 0), spec("PrefixMask", 100)),
    spec("LocalMask", 2**63, 2**31),
    spec("CausalMask", -(2**31)),
    either(spec("LocalMask", -(10**30), None), spec("LocalMask", 3, 0)),
    both(spec("ChunkedCausalMask", 2**31), spec("LocalMask", 9, None)),
    both(spec("CausalMask", 0), spec("PrefixMask", 2**40)),
]
# Just within reach, so that they matter where positions are far apart, and only there.
WITHIN_REACH = [
    spec("LocalMask", LAST - 1, 0),
    spec("LocalMask", 2**30 + 1, 2**31 - 3),
    spec("CausalMask", 1 - LAST),
    spec("LocalMask", -5, 7),
    spec("ChunkedCausalMask", LAST),
    both(spec("LocalMask", 2**30, 2**30), spec("PrefixMask", LAST)),
]
