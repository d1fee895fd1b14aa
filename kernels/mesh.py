"""What of a mesh a caller's own `jax.shard_map` maps over already."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P


def manual_axes() -> frozenset[str]:
    """The mesh axes that a `jax.shard_map` around this call maps over: arrays here are one device's part along them."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def spec_without(spec: P, axes: frozenset[str]) -> P:
    """The partition of what is left of an array that is split over some axes already."""

    def keep(entry: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
        named = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return tuple(axis for axis in named if axis not in axes) or None

    return P(*map(keep, spec))
