"""The mesh axes over which an array differs between devices: its "varying" axes inside `jax.shard_map`.

With `check_vma=True`, the default, JAX tracks them for each array, and a loop's carry must start with the axes that it
ends with. Everywhere else the functions here do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

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
