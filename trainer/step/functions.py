"""The training step: a pure function of state and batch, jitted over the mesh.

The model is split into its structure, closed over, and its parameters, a nested dict that travels with the
optimizer's state. Batches are dicts of [batch, sequence] arrays: tokens, targets, target_mask, segment_ids
and positions, as `trainer.data` makes them, and the token order where sequences are sharded over `mesh.context`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kernels import Target
from kernels.context import SequenceSharding
from layers import GPT, ActivationSharding
from layers.gpt import GatherLayer
from layers.moe import RouterSums
from trainer.config import TrainConfig
from trainer.step.attention_plan import plan_sequence_sharding
from trainer.step.host_offload import moments_on_host, require_host_memory
from trainer.step.loss import CrossEntropy, chunked_cross_entropy
from trainer.step.loss_plan import plan_loss
from trainer.step.optimizer import make_optimizer, make_schedule
from trainer.step.parameter_gather import ParameterGather
from trainer.step.router_loss import LossSums, add_router_losses, sum_load
from trainer.step.sharding import batch_sharding, is_on_host, parameter_shardings, replicated
from trainer.step.skipping import Skipping, judge, schedule_at
from trainer.step.tensor_plan import plan_tensor

WITHOUT_CUDA_GRAPHS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": str(2**30)}
"""XLA's compiler options that keep kernels out of CUDA graphs. Within one a profiler names no kernel's instruction."""

Batch = dict[str, Array]
BATCH_DTYPES = {
    "tokens": jnp.int32,
    "targets": jnp.int32,
    "target_mask": jnp.bool_,
    "segment_ids": jnp.int32,
    "positions": jnp.int32,
}


class TrainState(NamedTuple):
    """Everything that an update reads and writes."""

    step: Int[Array, ""]
    """Steps made so far, those whose update was skipped among them."""
    params: Any
    """Nested dict of float32 arrays, by the names of the model's attributes."""
    opt_state: Any
    """The optimizer's, its moments sharded like the parameters."""
    skipping: Skipping
    """What is remembered of updates that were skipped."""


class StepMetrics(NamedTuple):
    """Scalars of one step, on the device until read."""

    loss: Float[Array, ""]
    """Nats per target, without z-loss."""
    z_loss: Float[Array, ""]
    """z-loss per target, weighted."""
    grad_norm: Float[Array, ""]
    """Global norm of the gradient before clipping."""
    learning_rate: Float[Array, ""]
    """The learning rate of this update."""
    num_targets: Int[Array, ""]
    """Tokens that the loss is averaged over."""
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
    """Devices' micro-batches of which `CrossEntropy.num_recomputed` tells; None: all are computed from logits."""


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a config over one mesh. Nothing has run on a device yet."""

    mesh: Mesh
    graphdef: Any
    """The model's structure: `nnx.merge(graphdef, state.params)` is the model."""
    abstract_state: TrainState
    """Shapes, dtypes and shardings of the state."""
    abstract_gradient: Any
    """Shapes, dtypes and shardings of what gradients are added up in."""
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    """Shapes, dtypes and shardings of a training batch."""
    sequence_sharding: SequenceSharding
    """Which tokens of a sequence each rank of `mesh.context` holds."""
    abstract_eval_batch: dict[str, jax.ShapeDtypeStruct]
    """The same of an evaluation batch, which has as many sequences as a micro-batch."""
    init_state: Callable[[], TrainState]
    """Jitted: the state before the first step, made in its shards."""
    begin_state: Callable[[Any], TrainState]
    """Jitted: params → the state before the first step, with these parameters. Donates them."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
    """Jitted: one update. Donates the state."""
    gradients: Callable[[Any, Batch], tuple[Any, LossSums]]
    """Jitted: (params, batch) → (gradient of the mean loss, sums). What `train_step` updates by."""
    eval_step: Callable[[Any, Batch], tuple[Array, Array]]
    """Jitted: (params, batch) → (sum of nats, number of targets)."""

    @property
    def state_shardings(self) -> TrainState:
        """The state's tree with a NamedSharding in each leaf's place."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))


def make_step_functions(config: TrainConfig, mesh: Mesh) -> StepFunctions:
    """Builds the step functions of a config.

    Args:
      config: the experiment.
      mesh: from `make_mesh(config.mesh)`.

    Raises:
      ValueError: a parameter without a partition rule, or an axis that doesn't divide a parameter's dim.
      UserMistake: something is to be offloaded to the host, whose memory the devices don't reach, or as
        `plan_sequence_sharding`, `plan_tensor` and `plan_loss`.
    """
    require_host_memory(config, mesh.devices.flat[0])
    optimizer = make_optimizer(config.optimizer, config.num_steps, mesh)
    schedule = make_schedule(config.optimizer, config.num_steps)
    sequence_sharding, _ = plan_sequence_sharding(config, mesh)
    plan_tensor(config, mesh)  # refuses what can't serve
    target = Target.of(mesh.devices.flat[0])
    exp_logits = plan_loss(config, target).exp_logits(target)

    def make_model() -> GPT:
        exchange, collectives = config.context.exchange, config.tensor.collectives
        sharding = ActivationSharding(
            mesh, sequence_sharding=sequence_sharding, exchange=exchange, collectives=collectives
        )
        return GPT(config.model, rngs=nnx.Rngs(config.seed), activation_sharding=sharding)

    def init_state() -> TrainState:
        return begin_state(nnx.to_pure_dict(nnx.state(make_model(), nnx.Param)))

    def begin_state(params) -> TrainState:
        skipping = jax.tree.map(jnp.asarray, Skipping())
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), skipping)

    def run_model(params, batch: Batch, gather_layer: GatherLayer | None) -> tuple[GPT, Array, RouterSums | None]:
        """The model, its output and its routers' sums, of this device's tokens."""
        model = nnx.merge(graphdef, params)
        apart = config.data.keep_documents_apart
        hidden, router = model.with_router_sums(
            batch["tokens"],
            batch["segment_ids"] if apart else None,
            batch["positions"] if apart else None,
            batch.get("token_order"),
            counted=batch["target_mask"],
            gather_layer=gather_layer,
        )
        return model, hidden, router

    def cross_entropy(model: GPT, hidden: Array, batch: Batch) -> CrossEntropy:
        """Sums over this device's tokens."""
        with jax.named_scope("loss"):
            return chunked_cross_entropy(
                hidden,
                model.head_kernel,
                batch["targets"],
                batch["target_mask"],
                chunk_size=config.loss.chunk_size,
                z_loss=config.loss.z_loss,
                logits_soft_cap=config.model.final_logits_soft_cap,
                shared_over="tensor" if mesh.shape["tensor"] > 1 else None,
                exp_logits=exp_logits,
            )

    def training_loss(params, batch: Batch, *, gather_layer: GatherLayer | None = None) -> LossSums:
        """Sums over this device's tokens, what their routers add among them."""
        model, hidden, router = run_model(params, batch, gather_layer)
        load = None
        if router is not None:
            hidden, load = sum_load(hidden, router, batch["target_mask"], gather.sum)
        return add_router_losses(cross_entropy(model, hidden, batch), router, load, config.model.moe)

    def gradient_on_device(params, batch: Batch) -> tuple[Any, LossSums]:
        """The gradient of the mean over all devices' and micro-batches' targets, and their sums."""
        num_targets = jnp.maximum(gather.sum(batch["target_mask"].sum(dtype=jnp.int32)), 1)

        def share_of_loss(params, micro_batch, gather_layer=None):
            sums = training_loss(params, micro_batch, gather_layer=gather_layer)
            return sums.total / num_targets, sums

        if config.gradient_accumulation == 1:
            grads, sums = jax.grad(
                lambda params: share_of_loss(gather.gather_others(params), batch, gather.gather_layer), has_aux=True
            )(params)
            return grads, gather.sum(sums)

        whole = gather.gather(params)
        gradient = jax.grad(share_of_loss, has_aux=True)

        def accumulate(total, micro_batch):
            return jax.tree.map(jnp.add, total, gradient(whole, micro_batch)), None

        micro_batches = jax.tree.map(lambda x: _into_micro_batches(x, config.gradient_accumulation), batch)
        # In the parameters' dtype, whatever the layers' matrices are used in.
        no_grads = jax.tree.map(lambda w, stored: jnp.zeros(w.shape, stored.dtype), whole, params)
        no_sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(training_loss, whole, batch))
        (grads, sums), _ = lax.scan(accumulate, (no_grads, no_sums), micro_batches)
        return gather.reduce(grads), gather.sum(sums)

    def mean_loss_gradient(params, batch: Batch) -> tuple[Any, LossSums]:
        mapped = gather.map_devices(
            gradient_on_device, in_specs=(specs_of_params, spec_of_batch), out_specs=(specs_of_params, P())
        )
        grads, sums = mapped(params, batch)
        return lax.with_sharding_constraint(grads, shardings.params), sums

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        grads, sums = mean_loss_gradient(state.params, batch)
        num_targets = jnp.maximum(sums.num_targets, 1)
        loss, z_loss = sums.nats / num_targets, sums.z / num_targets
        load_balance, router_z = jax.tree.map(lambda total: total / num_targets, (sums.load_balance, sums.router_z))
        with jax.named_scope("optimizer"):
            grad_norm = optax.tree.norm(grads)
            finite = jnp.isfinite(loss) & jnp.isfinite(z_loss) & jnp.isfinite(grad_norm)
            accepted, skipping = judge(state.skipping, finite, grad_norm, config.optimizer.skip_grad_norm_above)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, finite=accepted)
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
                step=updated.step, opt_state=schedule_at(kept.opt_state, updated.step), skipping=skipping
            )
            learning_rate = schedule(state.step)
        of_update = (grad_norm, learning_rate, sums.num_targets, finite, *skipping[:2])
        num_recomputed = None if exp_logits is None else sums.num_recomputed
        return kept, StepMetrics(loss, z_loss, *of_update, load_balance, router_z, num_recomputed)

    def evaluate_on_device(params, batch: Batch) -> CrossEntropy:
        model, hidden, _ = run_model(gather.gather_others(params), batch, gather.gather_layer)
        return gather.sum(cross_entropy(model, hidden, batch))

    def eval_step(params, batch: Batch) -> tuple[Array, Array]:
        mapped = gather.map_devices(evaluate_on_device, in_specs=(specs_of_params, spec_of_batch), out_specs=P())
        sums = mapped(params, batch)
        return sums.nats, sums.num_targets

    graphdef = nnx.split(nnx.eval_shape(make_model), nnx.Param)[0]
    shapes = jax.eval_shape(init_state)
    shardings = parameter_shardings(shapes, mesh)
    if config.optimizer.offload_moments:
        shardings = shardings._replace(opt_state=moments_on_host(shapes.opt_state, shardings.opt_state))
    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    gather = ParameterGather(abstract_state.params, mesh, compute_dtype=config.model.compute_dtype)
    of_batch, of_scalar = batch_sharding(mesh), replicated(mesh)
    specs_of_params = jax.tree.map(lambda sharding: sharding.spec, shardings.params)
    spec_of_batch = of_batch.spec
    return StepFunctions(
        mesh=mesh,
        graphdef=graphdef,
        abstract_state=abstract_state,
        abstract_gradient=abstract_state.params if config.gradient_accumulation == 1 else gather.abstract_whole,
        sequence_sharding=sequence_sharding,
        abstract_batch=_abstract_batch(config, config.batch_size, mesh, sequence_sharding),
        abstract_eval_batch=_abstract_batch(
            config, config.batch_size // config.gradient_accumulation, mesh, sequence_sharding
        ),
        init_state=jax.jit(init_state, out_shardings=shardings),
        begin_state=jax.jit(begin_state, in_shardings=(shardings.params,), out_shardings=shardings, donate_argnums=0),
        train_step=jax.jit(
            train_step,
            in_shardings=(shardings, of_batch),
            out_shardings=(shardings, of_scalar),
            donate_argnums=0,
            compiler_options=compiler_options(mesh),
        ),
        gradients=jax.jit(
            mean_loss_gradient, in_shardings=(shardings.params, of_batch), out_shardings=(shardings.params, of_scalar)
        ),
        eval_step=jax.jit(eval_step, in_shardings=(shardings.params, of_batch), out_shardings=of_scalar),
    )


def compiler_options(mesh: Mesh) -> dict[str, str | bool] | None:
    """XLA's compiler options for a step on a mesh; None: its defaults.

    Within CUDA graphs, steps whose GPUs wait for each other in each layer were slower: "Training on four H200s" in
    docs/benchmarks.md.
    """
    waits = max(mesh.shape["tensor"], mesh.shape["context"]) > 1
    return WITHOUT_CUDA_GRAPHS if waits and mesh.devices.flat[0].platform == "gpu" else None


def _into_micro_batches(x: Array, count: int) -> Array:
    """[B, T] → [count, B / count, T], every count-th sequence to each, so that no sequence leaves its device."""
    return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)


def _abstract_batch(
    config: TrainConfig, batch_size: int, mesh: Mesh, sequence_sharding: SequenceSharding
) -> dict[str, jax.ShapeDtypeStruct]:
    shape, sharding = (batch_size, config.sequence_length), batch_sharding(mesh)
    dtypes = BATCH_DTYPES if sequence_sharding == "contiguous" else BATCH_DTYPES | {"token_order": jnp.int32}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
