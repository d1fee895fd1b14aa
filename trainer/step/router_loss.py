"""The losses of the routers of a mixture of experts.

The load-balance loss is of a whole micro-batch: experts' loads are counted over all devices. With several micro-batches
to an update it is their mean, each with the weight of its tokens. Padding doesn't count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from layers import MoEConfig
from layers.moe import RouterSums
from trainer.step.loss import CrossEntropy


class LossSums(NamedTuple):
    """Sums over the tokens that the mask leaves in. Only `total` carries a gradient."""

    total: Float[Array, ""]
    """The loss that training minimises (after division by a number of targets)."""
    nats: Float[Array, ""]
    """As in `CrossEntropy`."""
    z: Float[Array, ""]
    """As in `CrossEntropy`."""
    num_targets: Int[Array, ""]
    """As in `CrossEntropy`."""
    num_recomputed: Int[Array, ""]
    """As in `CrossEntropy`."""
    load_balance: Float[Array, ""] | None = None
    """The routers' load-balance loss, before its weight; None without routers."""
    router_z: Float[Array, ""] | None = None
    """The routers' z-loss, before its weight; None without routers."""


class Load(NamedTuple):
    """How often each expert was chosen in a micro-batch, on all devices."""

    choices: Int[Array, "L E"]
    num_tokens: Int[Array, ""]


def sum_load(
    hidden: Float[Array, "B T W"],
    router: RouterSums,
    counted: Bool[Array, "B T"],
    sum_over_devices: Callable[[Any], Any],
) -> tuple[Float[Array, "B T W"], Load]:
    """Counts experts' loads over all devices.

    Args:
      hidden: the model's output.
      router: of this device's tokens.
      counted: tokens that the router's sums are of.
      sum_over_devices: `ParameterGather.sum`.

    Returns:
      The model's output as it was, and the load. What follows from the output waits for the load, so that all devices
      exchange it at the same point of their programs.
    """
    load = sum_over_devices(Load(router.choices, counted.sum(dtype=jnp.int32)))
    return lax.optimization_barrier((hidden, load))


def add_router_losses(
    cross_entropy: CrossEntropy, router: RouterSums | None, load: Load | None, config: MoEConfig | None
) -> LossSums:
    """The loss of this device's tokens, with their share of the routers' losses."""
    if router is None or load is None or config is None:
        return LossSums(**cross_entropy._asdict())
    load_balance = router.load_balance(load.choices, jnp.maximum(load.num_tokens, 1))
    router_z = router.z_loss()
    added = config.load_balance_loss_weight * load_balance + config.router_z_loss_weight * router_z
    load_balance, router_z = lax.stop_gradient((load_balance, router_z))
    sums = cross_entropy._replace(total=cross_entropy.total + added)
    return LossSums(**sums._asdict(), load_balance=load_balance, router_z=router_z)
