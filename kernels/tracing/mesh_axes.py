"""Mesh axes inside `jax.shard_map`: those that it maps over, and those over which an array differs between devices.

With `check_vma=True`, the default, JAX tracks the latter, an array's "varying" axes, and a loop's carry must start with
the axes that it ends with. Everywhere else `varying_axes` finds none, and `vary` does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

CHECK_VMA_REASON = (
    "its kernels don't say over which mesh axes their outputs differ, as jax.shard_map checks by default; pass "
    "check_vma=False to jax.shard_map"
)


def varying_axes(tree: Any) -> tuple[str, ...]:
    """The axes over which any of the tree's arrays differs, sorted."""
    return tuple(sorted(frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))))


def vary(tree: Any, axes: Iterable[str]) -> Any:
    """The tree, with each array marked as one that differs over these axes; gradients are summed over those added."""

    def mark(x):
        missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def manual_axes() -> frozenset[str]:
    """The mesh axes that a `jax.shard_map` around this call maps over: arrays here are one device's part along them."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def spec_without(spec: P, axes: frozenset[str]) -> P:
    """The partition of what is left of an array that is split over some axes already."""

    def keep(entry: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
        named = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return tuple(axis for axis in named if axis not in axes) or None

    return P(*map(keep, spec))
