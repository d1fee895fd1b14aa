"""Kinds of calls, for which the kernels are tuned apart."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kernels.masks import Mask

Family = Literal["full", "causal", "window", "packed", "other"]


class Key(NamedTuple):
    """A kind of call: widest head dim, what the mask does to the walk, and length of the queries in tokens."""

    head_dim: int
    family: Family
    length: int


def mask_family(mask: Mask, *, packed: bool) -> Family:
    """What a mask, and documents where `packed`, do to a kernel's walk.

    >>> from kernels import CausalMask, LocalMask
    >>> mask_family(CausalMask() & LocalMask(1023, 0), packed=False)
    'window'
    """
    if packed:
        return "packed"
    if mask.allows_all:
        return "full"
    if mask.window is None or mask.window[1] != 0:
        return "other"
    return "causal" if mask.window[0] is None else "window"
