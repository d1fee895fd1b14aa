"""The losses of the routers of a mixture of experts.

The load-balance loss is of a whole micro-batch: experts' loads are counted over all devices. With several micro-batches
to an update it is their mean, each with the weight of its tokens.

Every token of a document counts alike, and padding doesn't. The weights of targets' losses don't enter: a chat's prompt
goes through experts as its answer does, so leaving it out would balance another load than the one that they carry, and
a negative weight would ask for imbalance. transformers (`load_balancing_loss_func`), Megatron-LM (#2121) and torchtitan
(#4594) leave out padding alone, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from layers import MoEConfig
from layers.moe import RouterSums
from trainer.step.loss import CrossEntropy, divide_by_weights


class LossSums(NamedTuple):
    """Sums over some of a step's tokens. Only `mean` carries a gradient."""

    mean: Float[Array, ""]
    """These tokens' part of the mean loss of the whole step, which training minimises."""
    nats: Float[Array, ""]
    """As in `CrossEntropy`."""
    z: Float[Array, ""]
    """As in `CrossEntropy`."""
    weight_sum: Float[Array, ""]
    """As in `CrossEntropy`."""
    num_targets: Int[Array, ""]
    """As in `CrossEntropy`."""
    num_tokens: Int[Array, ""]
    """Tokens of documents, whatever their targets' weights; padding is none."""
    num_recomputed: Int[Array, ""]
    """As in `CrossEntropy`."""
    load_balance: Float[Array, ""] | None = None
    """The routers' load-balance loss, before its weight; None without routers."""
    router_z: Float[Array, ""] | None = None
    """The routers' z-loss, before its weight; None without routers."""


class StepSize(NamedTuple):
    """Sums over all micro-batches and devices of a step, by which its losses are divided."""

    weight_sum: Float[Array, ""]
    """Divides the cross-entropy: the absolute values of the targets' weights."""
    num_tokens: Int[Array, ""]
    """Divides the routers' losses: the tokens of documents."""


class Load(NamedTuple):
    """How often each expert was chosen in a micro-batch, on all devices."""

    choices: Int[Array, "L E"]
    num_tokens: Int[Array, ""]


def sum_load(
    hidden: Float[Array, "B T W"],
    router: RouterSums,
    num_tokens: Int[Array, ""],
    sum_over_devices: Callable[[Any], Any],
) -> tuple[Float[Array, "B T W"], Load]:
    """Counts experts' loads over all devices.

    Args:
      hidden: the model's output.
      router: of this device's tokens.
      num_tokens: tokens that the router's sums are of.
      sum_over_devices: `ParameterGather.sum`.

    Returns:
      The model's output as it was, and the load. What follows from the output waits for the load, so that all devices
      exchange it at the same point of their programs.
    """
    load = sum_over_devices(Load(router.choices, num_tokens))
    return lax.optimization_barrier((hidden, load))


def join_losses(
    cross_entropy: CrossEntropy,
    num_tokens: Int[Array, ""],
    whole: StepSize,
    router: RouterSums | None,
    load: Load | None,
    config: MoEConfig | None,
) -> LossSums:
    """The losses of this device's tokens, the routers' among them, as parts of the whole step's means.

    Args:
      cross_entropy: of these tokens.
      num_tokens: of documents, of these.
      whole: the step's size.
      router: of these tokens, with the `load` of their micro-batch and the `config`; None: there are no routers.
    """
    of_targets = cross_entropy._asdict()
    mean = divide_by_weights(of_targets.pop("total"), whole.weight_sum)
    if router is None or load is None or config is None:
        return LossSums(mean, num_tokens=num_tokens, **of_targets)
    load_balance = router.load_balance(load.choices, jnp.maximum(load.num_tokens, 1))
    router_z = router.z_loss()
    of_routers = config.load_balance_loss_weight * load_balance + config.router_z_loss_weight * router_z
    mean += of_routers / jnp.maximum(whole.num_tokens, 1)
    load_balance, router_z = lax.stop_gradient((load_balance, router_z))
    return LossSums(mean, num_tokens=num_tokens, load_balance=load_balance, router_z=router_z, **of_targets)
