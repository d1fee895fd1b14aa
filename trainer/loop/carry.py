"""Carries the training state and the place in the data: from a phase to the next, or from another run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layers.layer_stacks import restack
from trainer.config import TrainConfig
from trainer.loop.setup import Setup
from trainer.step.functions import StepFunctions
from trainer.step.skipping import schedule_at
from trainer.step.train_step import TrainState


def enter_phase(state: TrainState, before: Setup, after: Setup) -> tuple[TrainState, list[str]]:
    """Goes from the end of a phase to the beginning of the next.

    Args:
      state: behind the last step of the phase; it is used up.
      before: of that phase. Its batches are closed.
      after: of the next phase. Its batches go on where those of `before` are.

    Returns:
      The state in the shards of the next phase, and lines that tell what the data couldn't continue exactly.
    """
    notes = after.batches.set_state(before.batches.get_state(), allow_changed=False)
    before.batches.close()
    state = into_layout(state, before.config, after.config, after.functions)
    return (state if after.phase.moments == "carry" else with_fresh_moments(state, after.functions)), notes


def into_layout(state: TrainState, before: TrainConfig, after: TrainConfig, functions: StepFunctions) -> TrainState:
    """The same state for another pattern of layers, on another mesh.

    Args:
      state: on the devices; it is used up.
      before: the config that it was made with.
      after: the config that goes on.
      functions: of `after`.
    """
    num_stacks, num_layers = after.model.pattern_length, after.model.num_layers
    if num_stacks != before.model.pattern_length:

        def has_blocks(tree: Any) -> bool:
            return isinstance(tree, dict) and "blocks" in tree

        def restacked(tree: Any) -> Any:
            return tree | {"blocks": restack(tree["blocks"], num_layers, num_stacks)} if has_blocks(tree) else tree

        # The moments hold blocks, too, each in a tree like the parameters'.
        state = jax.jit(lambda state: jax.tree.map(restacked, state, is_leaf=has_blocks))(state)
    return jax.device_put(state, functions.state_shardings, donate=True)


def with_fresh_moments(state: TrainState, functions: StepFunctions) -> TrainState:
    """The state with the optimizer's moments of a first step. The schedule and the skipped updates go on."""
    begun, step = functions.begin_state(state.params), jnp.copy(state.step)  # the step donates each buffer once
    return begun._replace(step=state.step, opt_state=schedule_at(begun.opt_state, step), skipping=state.skipping)
