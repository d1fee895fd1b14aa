"""Which updates are skipped, and what is remembered of them in the training state.

An update is skipped where the loss or a gradient isn't finite and, if asked for, where the gradient's norm spikes: it
is more than a multiple of the mean of recent ones. PaLM met such spikes about twenty times, whatever the clipping, and
went back to a checkpoint and past some batches by hand (arXiv:2204.02311, section 5.1); OLMo 2 skips the update instead
(arXiv:2501.00656, section 3).

A skipped update leaves the parameters and the optimizer's moments as they were. The step counts all the same: the data
go on with the next batch and the learning rate with its schedule, so that the order of tokens and the end of the run
don't depend on what was skipped. Everything is decided on the device, from the state alone, so that a run that resumes
decides the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

NUM_RECENT = 100
"""Accepted updates over which the mean of the gradient's norm reaches back. Before that number, no norm is a spike."""

_ZERO: Any = np.int32(0)  # NumPy's, so that importing this starts no device


class Skipping(NamedTuple):
    """The training state's record of skipped updates. By default, nothing was skipped and no norm is known."""

    num_skipped: Int[Array, ""] = _ZERO
    """Updates skipped in the whole run."""
    num_in_a_row: Int[Array, ""] = _ZERO
    """Updates skipped since the last one that wasn't."""
    num_accepted: Int[Array, ""] = _ZERO
    """Updates that weren't, counted up to `NUM_RECENT`."""
    mean_grad_norm: Float[Array, ""] = _ZERO.astype(np.float32)
    """Mean of the gradient's norm over accepted updates: all of the first `NUM_RECENT`, then exponentially moving."""


def judge(
    before: Skipping, finite: Bool[Array, ""], grad_norm: Float[Array, ""], skip_above: float | None
) -> tuple[Bool[Array, ""], Skipping]:
    """Decides whether an update is accepted.

    Args:
      before: what was remembered up to here.
      finite: whether loss and gradient are.
      grad_norm: global norm of the gradient, before clipping.
      skip_above: multiple of the mean norm that is a spike; None: none is.

    Returns:
      Whether the update is accepted, and what to remember from now on.
    """
    accepted = finite
    if skip_above is not None:
        is_known = before.num_accepted >= NUM_RECENT
        accepted &= ~is_known | (grad_norm <= skip_above * before.mean_grad_norm)
    num_accepted = jnp.minimum(before.num_accepted + 1, NUM_RECENT)
    mean_grad_norm = before.mean_grad_norm + (grad_norm - before.mean_grad_norm) / num_accepted
    skipped = (~accepted).astype(jnp.int32)
    return accepted, Skipping(
        num_skipped=before.num_skipped + skipped,
        num_in_a_row=(before.num_in_a_row + 1) * skipped,
        num_accepted=jnp.where(accepted, num_accepted, before.num_accepted),
        mean_grad_norm=jnp.where(accepted, mean_grad_norm, before.mean_grad_norm),
    )


def schedule_at(opt_state: Any, step: Int[Array, ""]) -> Any:
    """The optimizer's state with its schedules at a step, though fewer updates were made. Adam's count stays."""

    def is_of_a_schedule(path: tuple[Any, ...], _: Any) -> bool:
        return getattr(path[-1], "tuple_name", None) == optax.ScaleByScheduleState.__name__

    return optax.tree.set(opt_state, is_of_a_schedule, count=step)
