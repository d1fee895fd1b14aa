"""Optimizer moments that wait in the host's memory between updates, and what a device needs for that.

A whole update with all moments on the device would need as much of its memory as if they had never left. XLA schedules
copies as early as their operands are there, whatever barriers say, so only a loop's data dependencies hold them back:
each stack of layers is updated in a loop, and the device holds the moments of one layer at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool

from layers.remat import HOST_MEMORY, offloads
from trainer.config import TrainConfig
from trainer.errors import UserMistake
from trainer.step.sharding import is_on_host


def require_host_memory(config: TrainConfig, device: jax.Device) -> None:
    """Checks that a device can reach the host's memory, if the config offloads anything to it.

    Args:
      config: the experiment.
      device: one of those to train on; it may be a topology's.

    Raises:
      UserMistake: it can't.
    """
    offloading = {
        f"--model.remat {config.model.remat}": offloads(config.model.remat),
        "--optimizer.offload-moments True": config.optimizer.offload_moments,
    }
    kinds = [memory.kind for memory in device.addressable_memories()]
    used = [flag for flag, is_used in offloading.items() if is_used]
    # The devices of a GPU topology list no memories, and XLA compiles the offload for them.
    if used and kinds and HOST_MEMORY not in kinds:
        raise UserMistake(
            f"{' and '.join(used)} offloads to the host, but {device.device_kind} ({device.platform}) reaches no "
            f"{HOST_MEMORY} memory, only {', '.join(kinds)}; leave it out, or recompute more (--model.remat full)"
        )


def moments_on_host(opt_state: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state with its moments in the host's memory. Counters stay on the device.

    Args:
      opt_state: arrays or `jax.ShapeDtypeStruct`s.
      shardings: a NamedSharding in each leaf's place.

    Raises:
      UserMistake: JAX knows no memories of these devices, as of GPUs that aren't there (seen in JAX 0.11.2).
    """
    on_host = jax.tree.map(
        lambda leaf, sharding: sharding.with_memory_kind(HOST_MEMORY) if leaf.shape else sharding, opt_state, shardings
    )
    if not any(map(is_on_host, jax.tree.leaves(on_host))):
        device = jax.tree.leaves(shardings)[0].mesh.devices.flat[0]
        raise UserMistake(
            f"--optimizer.offload-moments True: JAX {jax.__version__} can't lay arrays out in the host's memory for a "
            f"{device.device_kind} ({device.platform}) that isn't there; compile it on a machine that has one, or "
            "without the flag"
        )
    return on_host


def stream_moments(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation whose moments lie in the host's memory, and are on the device only for their own update.

    `update` takes `finite` beside its usual arguments: where that is False, the moments stay as they were. The caller
    couldn't put them back, since by then they aren't on the device any more.

    Args:
      inner: updates each element by itself. Its state is a NamedTuple whose fields are counters, and trees of moments
        of the parameters' structure.

    Returns:
      The transformation, with a state of the same form.
    """

    def update(updates: Any, state: Any, params: Any = None, *, finite: Bool[Array, ""], **_: Any) -> tuple[Any, Any]:
        del params  # Adam's and Muon's moments follow from gradients alone
        leaves: list[Array]
        treedef: Any  # JAX's stubs leave the class out
        leaves, treedef = jax.tree.flatten(updates)
        fields = state._asdict()
        is_moment = {name: jax.tree.structure(field) == treedef for name, field in fields.items()}
        counters = {name: field for name, field in fields.items() if not is_moment[name]}
        trees = {name: treedef.flatten_up_to(field) for name, field in fields.items() if is_moment[name]}

        def update_leaf(leaf: Array, on_host: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            is_stack = leaf.ndim > 2  # block matrices, [layers, …]

            def get(array: Array, index: Array) -> Array:
                return lax.dynamic_index_in_dim(array, index, keepdims=False) if is_stack else array

            def put(array: Array, part: Array, index: Array) -> Array:
                return lax.dynamic_update_index_in_dim(array, part, index, axis=0) if is_stack else part

            def update_part(index: Array, carry: tuple[Array, dict[str, Array]]) -> tuple[Array, dict[str, Array]]:
                leaf, on_host = carry
                parts = {
                    name: jax.device_put(get(array, index), jax.memory.Space.Device) for name, array in on_host.items()
                }
                updated, new = inner.update(get(leaf, index), type(state)(**counters, **parts))
                back = {name: jax.device_put(getattr(new, name), jax.memory.Space.Host) for name in on_host}
                on_host = {name: put(array, back[name], index) for name, array in on_host.items()}
                return put(leaf, updated, index), on_host

            # A number of trips that the data decides: no trip if not finite, and XLA can't unroll a single one.
            num_trips = jnp.where(finite, leaf.shape[0] if is_stack else 1, 0)
            return lax.fori_loop(0, num_trips, update_part, (leaf, on_host))

        done = [
            update_leaf(leaf, {name: tree[index] for name, tree in trees.items()}) for index, leaf in enumerate(leaves)
        ]
        _, counted = inner.update((), type(state)(**counters, **dict.fromkeys(trees, ())))
        moments = {name: treedef.unflatten([on_host[name] for _, on_host in done]) for name in trees}
        return treedef.unflatten([leaf for leaf, _ in done]), counted._replace(**moments)

    return optax.GradientTransformationExtraArgs(inner.init, update)
