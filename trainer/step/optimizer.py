"""AdamW (arXiv:1711.05101) or Muon, with warm-up and a cosine or warm-up–stable–decay schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from trainer.config import OptimizerConfig
from trainer.step.host_offload import stream_moments
from trainer.step.muon import muon_or_adam, orthogonalize
from trainer.step.sharding import path_name

# Chosen by a parameter's name, not its rank: a norm's scale, stacked over layers, is a matrix too.
DECAYED = frozenset({"kernel", "embedding", "a", "b"})  # a and b of adapters
NOT_DECAYED = frozenset({"scale", "bias", "sinks"})


def make_schedule(config: OptimizerConfig, num_steps: int, first: int = 0) -> optax.Schedule:
    """The learning rate as a function of the number of updates made before.

    The first update already has 1 / num_warmup_steps of the peak, since one at 0 would do nothing; update
    num_warmup_steps has the peak itself, and the last one exactly the final fraction of it, in float32. WSD (MiniCPM,
    arXiv:2404.06395) holds the peak until its linear decay begins.

    Args:
      config: the peak, the shape and its parameters.
      num_steps: updates in the whole schedule.
      first: updates of the run before the schedule's first.

    Returns:
      An optax schedule: count (int, 0 for the first update) → learning rate (float32).

    Raises:
      ValueError: the warm-up and a decay to the final fraction don't fit into `num_steps`; only where that fraction
        is 1 can the warm-up take all of them.

    >>> schedule = make_schedule(OptimizerConfig(learning_rate=1.0, num_warmup_steps=10), num_steps=100)
    >>> [round(float(schedule(count)), 3) for count in (0, 9, 99)]
    [0.1, 1.0, 0.1]
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate_fraction
    num_decay_steps = config.num_decay_steps(num_steps)

    def schedule(count):
        # Counted in integers: from 2**24 on float32 can't tell neighbouring steps apart. Counted from the end, so that
        # the rest of the decay is exactly 0 there, even if XLA multiplies by a rounded reciprocal.
        step = jnp.clip(jnp.asarray(count, jnp.int32) - first, 0, num_steps - 1) + 1
        num_left = jnp.minimum(num_steps - step, num_decay_steps)
        warmup = jnp.where(step < config.num_warmup_steps, _ratio(step, config.num_warmup_steps), 1.0)
        above_final = _ratio(num_left, num_decay_steps)
        if config.schedule == "cosine":
            above_final = jnp.sin(jnp.pi / 2 * above_final) ** 2
        above_final = jnp.where(num_left < num_decay_steps, above_final, 1.0)
        return warmup * (peak * above_final + final * (1.0 - above_final))

    return schedule


def _ratio(count: jax.Array, of: int) -> jax.Array:
    return count.astype(jnp.float32) / max(of, 1)


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay applies to: kernels, adapters and embeddings, by name.

    Returns:
      The tree with a bool in each leaf's place.

    Raises:
      ValueError: a parameter's name is in neither list.
    """

    def decays(path, _):
        name = path_name(path)
        leaf = name.rpartition(".")[2]
        if leaf not in DECAYED | NOT_DECAYED:
            raise ValueError(
                f"weight decay knows no parameter named {leaf!r} ({name}); "
                "add it to DECAYED or NOT_DECAYED in trainer/step/optimizer.py"
            )
        return leaf in DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(
    config: OptimizerConfig, num_steps: int, mesh: Mesh | None = None, first: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, Adam or Muon, decoupled weight decay, and the schedule.

    The moments have the parameters' shapes and take float32 from them and from the gradients.

    Args:
      config: hyperparameters.
      num_steps: updates that the schedule spans.
      mesh: that the parameters lie on, and that Muon spreads its layers over; None: one device.
      first: updates of the run before the schedule's first.

    Returns:
      The optimizer. With `offload_moments`, `update` takes `finite` as well; see `stream_moments`.

    Raises:
      ValueError: as `make_schedule`.
    """
    held = stream_moments if config.offload_moments else lambda inner: inner
    moments = held(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=jnp.float32))
    if config.kind == "muon":
        momentum = held(optax.trace(config.momentum, nesterov=True, accumulator_dtype=jnp.float32))
        by_rule = {"muon": optax.chain(momentum, orthogonalize(mesh)), "adam": moments}
        moments = optax.partition(by_rule, muon_or_adam)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        moments,
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(make_schedule(config, num_steps, first)),
    )
