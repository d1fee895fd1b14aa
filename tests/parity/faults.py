"""Mistakes of the kind that a mesh invites, to be found by the comparison."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from kernels import CausalMask
from kernels.context import attend_over_mesh
from tests.parity.cases import Case, Placement, Problem
from trainer.step.router_loss import join_losses, sum_load

_DENSE = Case(
    Problem("window_documents", (16, 8), "dense", seed=0),
    # float32 allows more than float64, and a fault does as much in either.
    Placement((1, 2, 2, 2), "all_gather", "zigzag", loss_chunk=24, dtype="float32"),
)
_MIXTURE = Case(
    Problem("causal", (8, 8), "mixture", seed=0),
    Placement((1, 2, 2, 2), "all_gather", "contiguous", accumulation=2),
)
_TREE = Case(
    Problem("tree", (8, 2), "dense", seed=0),
    Placement((1, 2, 2, 2), "ring", "balanced"),
)
FAULTS = {
    _DENSE: ("wrong scale", "dropped document boundary", "dropped window", "wrong gradient"),
    _TREE: ("dropped bounds", "bounds of a token too many"),
    _MIXTURE: ("load of one device", "router losses twice over an axis", "weights of one device"),
}
"""Cases that have what the faults drop or count."""


def injected(fault: str) -> AbstractContextManager[Any]:
    """A step on a mesh, with a mistake in it."""
    if fault in FAULTS[_MIXTURE]:
        return _in_losses(fault)
    assert fault in (*FAULTS[_DENSE], *FAULTS[_TREE]), fault
    return _in_attention(fault)


def _in_attention(fault: str) -> AbstractContextManager[Any]:
    def with_fault(query, key, value, mask, layout, *, segment_ids, bounds, **options):
        if fault == "wrong scale":
            options["scale"] = 1.01 * query.shape[-1] ** -0.5
        elif fault == "dropped document boundary":
            segment_ids = jnp.where(segment_ids == 2, 1, segment_ids)
        elif fault == "dropped window":
            mask = CausalMask()
        elif fault == "wrong gradient":
            value = _with_scaled_gradient(value)
        elif fault == "dropped bounds":
            bounds = None
        elif fault == "bounds of a token too many":
            bounds = jax.tree.map(lambda bound: bound + 1, bounds)
        return attend_over_mesh(query, key, value, mask, layout, segment_ids=segment_ids, bounds=bounds, **options)

    return mock.patch("layers.attention.attend_over_mesh", with_fault)


def _in_losses(fault: str) -> AbstractContextManager[Any]:
    if fault == "load of one device":
        return mock.patch(
            "trainer.step.train_step.sum_load", lambda *arguments: sum_load(*arguments[:-1], lambda load: load)
        )

    def with_fault(cross_entropy, num_tokens, whole, router, *others):
        if fault == "weights of one device":
            whole = whole._replace(weight_sum=cross_entropy.weight_sum)
        else:  # each rank has the sum of all of them, and the ranks' losses are summed
            router = jax.tree.map(lambda x: lax.psum(x, "context"), router)
        return join_losses(cross_entropy, num_tokens, whole, router, *others)

    return mock.patch("trainer.step.train_step.join_losses", with_fault)


@jax.custom_vjp
def _with_scaled_gradient(x):
    return x


_with_scaled_gradient.defvjp(lambda x: (x, None), lambda _, d: (1.01 * d,))
