"""The training step and the evaluation step, as pure functions of the state and a batch.

The model is split into its structure, in `StepContext`, and its parameters, a nested dict that travels with the
optimizer's state. Batches are dicts of [batch, sequence] arrays: tokens, targets, weights, segment_ids and positions,
as `trainer.data` makes them, and the token order where sequences are sharded over `mesh.context`. A batch of trees also
has q_end, by which attention stays within branches. The step adds k_start, by which it stays within a scheduled window.

The loss is the sum of the targets' losses times their weights over that of the weights' absolute values, in training
and evaluation. Both sums are of all micro-batches and devices, so no partition of a batch changes the loss.

`train_step` calls from top to bottom: `mean_loss_gradient`, in it `gradient_on_device` on each device, in it
`training_loss`, in it `run_model` and `cross_entropy`; then `update`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kernels import Bounds
from kernels.loss.exp_logits import ExpLogits
from kernels.tracing.number_types import at_least_float32
from layers import GPT
from layers.gpt import GatherLayer
from layers.moe import RouterSums
from trainer.config import TrainConfig
from trainer.step.frozen import join_frozen, split_frozen
from trainer.step.loss import (
    CrossEntropy,
    TokenLosses,
    chunked_cross_entropy,
    divide_by_weights,
    sum_weights,
    token_losses,
)
from trainer.step.parameter_gather import ParameterGather
from trainer.step.router_loss import LossSums, StepSize, join_losses, sum_load
from trainer.step.sharding import is_on_host
from trainer.step.skipping import Skipping, judge, schedule_at

Batch = dict[str, Array]
BATCH_DTYPES = {
    "tokens": jnp.int32,
    "targets": jnp.int32,
    "weights": jnp.float32,
    "segment_ids": jnp.int32,
    "positions": jnp.int32,
}
TREE_DTYPES = {"q_end": jnp.int32}
"""Of what a batch of trees has beside it."""


class TrainState(NamedTuple):
    """Everything that an update reads and writes."""

    step: Int[Array, ""]
    """Steps made so far, those whose update was skipped among them."""
    params: Any
    """Nested dict by the names of the model's attributes, of float32 arrays, and bfloat16 where they are frozen."""
    opt_state: Any
    """The optimizer's, of the parameters that train, its moments sharded like them."""
    skipping: Skipping
    """The record of updates that were skipped."""


class StepMetrics(NamedTuple):
    """Scalars of one step, on the device until read."""

    loss: Float[Array, ""]
    """Nats per target, without z-loss; targets count by their weights. 0 where all weights are 0."""
    z_loss: Float[Array, ""]
    """z-loss per target, weighted."""
    grad_norm: Float[Array, ""]
    """Global norm of the gradient before clipping."""
    learning_rate: Float[Array, ""]
    """The learning rate of this update."""
    num_targets: Int[Array, ""]
    """Targets whose weight isn't 0, each once."""
    num_tokens: Int[Array, ""]
    """Tokens of documents, with those whose targets have weight 0, such as a prompt's; padding is none."""
    finite: Bool[Array, ""]
    """False: loss or gradient overflowed."""
    num_skipped: Int[Array, ""]
    """Updates skipped up to this one, in the whole run."""
    num_skipped_in_a_row: Int[Array, ""]
    """0: this update was accepted."""
    load_balance_loss: Float[Array, ""] | None = None
    """Of the routers of a mixture of experts, the mean over tokens and layers, before its weight; None without them."""
    router_z_loss: Float[Array, ""] | None = None
    """The same of their z-loss."""
    num_losses_recomputed: Int[Array, ""] | None = None
    """Devices' micro-batches whose `CrossEntropy.num_recomputed` is 1; None: all losses are computed from logits."""
    window: Int[Array, ""] | None = None
    """Tokens in the scheduled window; None: no mask has one."""


@dataclass(frozen=True)
class StepContext:
    """All that the functions of a step share, and that stays the same from step to step."""

    config: TrainConfig
    graphdef: Any
    """The model's structure: `nnx.merge(graphdef, state.params)` is the model."""
    gather: ParameterGather
    """The exchange of parameters and gradients between devices."""
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    """Step → learning rate."""
    exp_logits: ExpLogits | None
    """The kernel of the loss; None: XLA computes logits."""
    shardings: TrainState
    """The NamedSharding of each array of the state."""
    batch_sharding: NamedSharding
    """Of each array of a batch."""

    @property
    def specs_of_params(self) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings.params)

    def split(self, params: Any) -> tuple[Any, Any]:
        """The parameters that train, and the frozen ones."""
        return split_frozen(self.config.lora, params)


def train_step(context: StepContext, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """One update of the state, unless it is skipped."""
    grads, sums = mean_loss_gradient(context, state.params, with_window(context, batch, state.step + 1))
    return update(context, state, grads, sums)


def eval_step(context: StepContext, params: Any, batch: Batch, step: Int[Array, ""]) -> CrossEntropy:
    """Sums over all devices' targets, after a step."""
    mapped = context.gather.map_devices(
        functools.partial(evaluate_on_device, context),
        in_specs=(context.specs_of_params, context.batch_sharding.spec),
        out_specs=P(),
    )
    return mapped(params, with_window(context, batch, step))


def evaluate_on_device(context: StepContext, params: Any, batch: Batch) -> CrossEntropy:
    """Sums over all devices' tokens, of this device's shards and tokens."""
    gather = context.gather
    model, hidden, _ = run_model(context, gather.gather_others(params), batch, gather.gather_layer)
    return gather.sum(cross_entropy(context, model, hidden, batch))


def token_step(context: StepContext, params: Any, batch: Batch) -> TokenLosses:
    """The loss of each target, and whether the model holds it the likeliest: [B, T], in the batch's order."""
    spec = context.batch_sharding.spec
    mapped = context.gather.map_devices(
        functools.partial(token_losses_on_device, context),
        in_specs=(context.specs_of_params, spec),
        out_specs=spec,
    )
    return mapped(params, batch)


def token_losses_on_device(context: StepContext, params: Any, batch: Batch) -> TokenLosses:
    """Of this device's tokens."""
    gather, config = context.gather, context.config
    model, hidden, _ = run_model(context, gather.gather_others(params), batch, gather.gather_layer)
    with jax.named_scope("loss"):
        return token_losses(
            hidden,
            model.head_kernel,
            batch["targets"],
            chunk_size=config.loss.chunk_size,
            logits_soft_cap=config.model.final_logits_soft_cap,
        )


def mean_loss_gradient(context: StepContext, params: Any, batch: Batch) -> tuple[Any, LossSums]:
    """The gradient of the mean loss by what trains, sharded as that is, and the sums over all targets."""
    mapped = context.gather.map_devices(
        functools.partial(gradient_on_device, context),
        in_specs=(context.specs_of_params, context.batch_sharding.spec),
        out_specs=(context.split(context.specs_of_params)[0], P()),
    )
    grads, sums = mapped(params, batch)
    return lax.with_sharding_constraint(grads, context.split(context.shardings.params)[0]), sums


def gradient_on_device(context: StepContext, params: Any, batch: Batch) -> tuple[Any, LossSums]:
    """The gradient of the mean over all devices' and micro-batches' targets, and their sums."""
    gather, dtype = context.gather, at_least_float32(jnp.dtype(context.config.model.compute_dtype))
    whole_size = gather.sum(StepSize(sum_weights(batch["weights"], dtype), count_tokens(batch)))

    def share_of_loss(trained, frozen, micro_batch, gather_layer=None):
        sums = training_loss(context, join_frozen(trained, frozen), micro_batch, whole_size, gather_layer)
        return sums.mean, sums

    if context.config.gradient_accumulation == 1:
        trained, frozen = context.split(params)

        def loss_of(trained):
            gathered = context.split(gather.gather_others(join_frozen(trained, frozen)))
            return share_of_loss(*gathered, batch, gather.gather_layer)

        grads, sums = jax.grad(loss_of, has_aux=True)(trained)
        return grads, gather.sum(sums)

    whole = gather.gather(params)
    whole_trained, whole_frozen = context.split(whole)
    gradient = jax.grad(share_of_loss, has_aux=True)

    def accumulate(total, micro_batch):
        return jax.tree.map(jnp.add, total, gradient(whole_trained, whole_frozen, micro_batch)), None

    micro_batches = jax.tree.map(lambda x: _into_micro_batches(x, context.config.gradient_accumulation), batch)
    # In the parameters' dtype, whatever the layers' matrices are used in.
    no_grads = jax.tree.map(lambda w, stored: jnp.zeros(w.shape, stored.dtype), whole_trained, context.split(params)[0])
    shapes = jax.eval_shape(functools.partial(training_loss, context), whole, batch, whole_size)
    no_sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (grads, sums), _ = lax.scan(accumulate, (no_grads, no_sums), micro_batches)
    return gather.reduce(grads), gather.sum(sums)


def with_window(context: StepContext, batch: Batch, step: Int[Array, ""]) -> Batch:
    """The batch, with the first key of each query's scheduled window at a step, if there is such a window."""
    window = context.config.model.scheduled_window
    if window is None:
        return batch
    batch_size, length = batch["tokens"].shape
    # An index in the sequence, whichever device has the token. It goes to devices and micro-batches as the tokens do.
    index = batch.get("token_order", jnp.arange(length, dtype=jnp.int32))
    return batch | {"k_start": jnp.broadcast_to(index - (window.width(step) - 1), (batch_size, length))}


def training_loss(
    context: StepContext, params: Any, batch: Batch, whole: StepSize, gather_layer: GatherLayer | None = None
) -> LossSums:
    """The losses of this device's tokens, the routers' among them, of a step of a given size."""
    model, hidden, router = run_model(context, params, batch, gather_layer)
    num_tokens, load = count_tokens(batch), None
    if router is not None:
        hidden, load = sum_load(hidden, router, num_tokens, context.gather.sum)
    loss = cross_entropy(context, model, hidden, batch)
    return join_losses(loss, num_tokens, whole, router, load, context.config.model.moe)


def count_tokens(batch: Batch) -> Int[Array, ""]:
    """Tokens of documents; padding is none."""
    return are_tokens(batch).sum(dtype=jnp.int32)


def are_tokens(batch: Batch) -> Bool[Array, "B T"]:
    """True for tokens of documents, False for padding."""
    return batch["segment_ids"] > 0


def run_model(
    context: StepContext, params: Any, batch: Batch, gather_layer: GatherLayer | None
) -> tuple[GPT, Array, RouterSums | None]:
    """The model, its output and its routers' sums, of this device's tokens."""
    model = nnx.merge(context.graphdef, params)
    apart = context.config.data.keep_documents_apart
    hidden, router = model.with_router_sums(
        batch["tokens"],
        batch["segment_ids"] if apart else None,
        batch["positions"] if apart else None,
        batch.get("token_order"),
        bounds=bounds_of(context, batch),
        counted=are_tokens(batch),
        gather_layer=gather_layer,
    )
    return model, hidden, router


def bounds_of(context: StepContext, batch: Batch) -> Bounds | list[Bounds | None] | None:
    """The bounds that a batch has: for all layers, or for those whose mask has the scheduled window."""
    bounds, model = Bounds(**{name: batch[name] for name in Bounds._fields if name in batch}), context.config.model
    if not bounds.given:
        return None
    if model.scheduled_window is None:
        return bounds
    masks = (model.layer(index).mask for index in range(model.pattern_length))
    return [None if mask.scheduled_window is None else bounds for mask in masks]


def cross_entropy(context: StepContext, model: GPT, hidden: Array, batch: Batch) -> CrossEntropy:
    """Sums over this device's tokens."""
    config = context.config
    with jax.named_scope("loss"):
        return chunked_cross_entropy(
            hidden,
            model.head_kernel,
            batch["targets"],
            batch["weights"],
            chunk_size=config.loss.chunk_size,
            z_loss=config.loss.z_loss,
            logits_soft_cap=config.model.final_logits_soft_cap,
            shared_over="tensor" if config.mesh.tensor > 1 else None,
            exp_logits=context.exp_logits,
        )


def update(context: StepContext, state: TrainState, grads: Any, sums: LossSums) -> tuple[TrainState, StepMetrics]:
    """The state after an update by a gradient, or after a skipped one, and the metrics of the step."""
    trained, frozen = context.split(state.params)
    state, shardings = state._replace(params=trained), context.shardings
    shardings = shardings._replace(params=context.split(shardings.params)[0])
    loss, z_loss = (divide_by_weights(total, sums.weight_sum) for total in (sums.nats, sums.z))
    num_tokens = jnp.maximum(sums.num_tokens, 1)
    load_balance, router_z = jax.tree.map(lambda total: total / num_tokens, (sums.load_balance, sums.router_z))
    with jax.named_scope("optimizer"):
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(z_loss) & jnp.isfinite(grad_norm)
        skip_above = context.config.optimizer.skip_grad_norm_above
        accepted, skipping = judge(state.skipping, finite, grad_norm, skip_above)
        updates, opt_state = context.optimizer.update(grads, state.opt_state, state.params, finite=accepted)
        updated = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, skipping)
        # A select fuses into the update. A branch would keep both states alive. Moments on the host are kept there.
        kept = jax.tree.map(
            lambda new, old, sharding: new if is_on_host(sharding) else jnp.where(accepted, new, old),
            updated,
            state,
            shardings,
        )
        # A skipped update is a step, too.
        kept = kept._replace(
            step=updated.step,
            params=join_frozen(kept.params, frozen),
            opt_state=schedule_at(kept.opt_state, updated.step),
            skipping=skipping,
        )
        learning_rate = context.schedule(state.step)
    window = context.config.model.scheduled_window
    metrics = StepMetrics(
        loss,
        z_loss,
        grad_norm,
        learning_rate,
        sums.num_targets,
        sums.num_tokens,
        finite,
        skipping.num_skipped,
        skipping.num_in_a_row,
        load_balance,
        router_z,
        None if context.exp_logits is None else sums.num_recomputed,
        None if window is None else window.width(updated.step),
    )
    return kept, metrics


def _into_micro_batches(x: Array, count: int) -> Array:
    """[B, T] → [count, B / count, T], every count-th sequence to each, so that no sequence leaves its device."""
    return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
