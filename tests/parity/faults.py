"""Mistakes of the kind that a mesh invites, to be found by the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp

from kernels import CausalMask
from layers import ActivationSharding
from tests.parity.cases import Case, Placement, Problem

FAULTS = ("wrong scale", "dropped document boundary", "dropped window", "wrong gradient")
FAULTY = Case(
    Problem("window_documents", (16, 8), seed=0),
    # float32 allows more than float64, and a fault does as much in either.
    Placement((1, 2, 2, 2), "ring", "zigzag", accumulation=2, loss_chunk=24, remat="full", dtype="float32"),
)
"""A case that has what the faults drop."""


@contextmanager
def injected(fault: str) -> Iterator[None]:
    """Attention over a mesh, with a mistake in it."""
    attend = ActivationSharding.dot_product_attention

    def with_fault(self, query, key, value, mask, *, segment_ids, **options):
        if fault == "wrong scale":
            options["scale"] = 1.01 * query.shape[-1] ** -0.5
        elif fault == "dropped document boundary":
            segment_ids = jnp.where(segment_ids == 2, 1, segment_ids)
        elif fault == "dropped window":
            mask = CausalMask()
        elif fault == "wrong gradient":
            value = _with_scaled_gradient(value)
        else:
            raise AssertionError(f"{fault!r} is not one of {FAULTS}")
        return attend(self, query, key, value, mask, segment_ids=segment_ids, **options)

    with mock.patch.object(ActivationSharding, "dot_product_attention", with_fault):
        yield


@jax.custom_vjp
def _with_scaled_gradient(x):
    return x


_with_scaled_gradient.defvjp(lambda x: (x, None), lambda _, d: (1.01 * d,))
