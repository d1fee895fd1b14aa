"""The functions of a config's step, jitted over the mesh, and the shapes of all that they take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from kernels.context import SequenceSharding
from layers import GPT, ActivationSharding
from layers.lora import add_adapters
from trainer.config import TrainConfig
from trainer.step.frozen import split_frozen, with_frozen_dtype
from trainer.step.host_offload import moments_on_host, require_host_memory
from trainer.step.loss import CrossEntropy, TokenLosses
from trainer.step.optimizer import make_optimizer, make_schedule
from trainer.step.parameter_gather import ParameterGather
from trainer.step.plan import Plan, make_plan
from trainer.step.router_loss import LossSums
from trainer.step.sharding import batch_sharding, parameter_shardings, replicated
from trainer.step.skipping import Skipping
from trainer.step.train_step import (
    BATCH_DTYPES,
    TREE_DTYPES,
    Batch,
    StepContext,
    StepMetrics,
    TrainState,
    eval_step,
    mean_loss_gradient,
    token_step,
    train_step,
)

WITHOUT_CUDA_GRAPHS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": str(2**30)}
"""XLA's compiler options that keep kernels out of CUDA graphs. Within one a profiler names no kernel's instruction."""


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
    abstract_eval_batch: dict[str, jax.ShapeDtypeStruct]
    """The same of an evaluation batch, which has as many sequences as a micro-batch."""
    init_state: Callable[[], TrainState]
    """Jitted: the state before the first step, made in its shards."""
    init_trained: Callable[[], Any]
    """Jitted: of these parameters, those that train. Without adapters, all."""
    begin_state: Callable[[Any], TrainState]
    """Jitted: params → the state before the first step, with these parameters. Donates them."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
    """Jitted: one update. Donates the state."""
    gradients: Callable[[Any, Batch], tuple[Any, LossSums]]
    """Jitted: (params, batch) → (gradient of the mean loss, sums). What `train_step` updates by."""
    eval_step: Callable[[Any, Batch, Any], CrossEntropy]
    """Jitted: (params, batch, steps behind them) → sums over all targets."""
    token_step: Callable[[Any, Batch], TokenLosses]
    """Jitted: (params, batch) → loss of each target, [B, T], whole on every device and in the batch's order."""

    @property
    def state_shardings(self) -> TrainState:
        """The state's tree with a NamedSharding in each leaf's place."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))


def make_step_functions(
    config: TrainConfig, mesh: Mesh, plan: Plan | None = None, *, schedule_from: int = 0
) -> StepFunctions:
    """Builds the step functions of a config.

    Args:
      config: the experiment.
      mesh: from `make_mesh(config.mesh)`.
      plan: from `make_plan`; None: it is made here.
      schedule_from: steps of the run before the first of `config.num_steps`.

    Raises:
      ValueError: a parameter without a partition rule, or an axis that doesn't divide a parameter's dim.
      UserMistake: something is to be offloaded to the host, whose memory the devices don't reach, or as `make_plan`.
    """
    require_host_memory(config, mesh.devices.flat[0])
    plan = make_plan(config, mesh) if plan is None else plan
    model = functools.partial(make_model, config, mesh, plan)
    optimizer = make_optimizer(config.optimizer, config.num_steps, mesh, schedule_from)
    init = functools.partial(init_state, config, model, optimizer)
    shapes = jax.eval_shape(init)
    shardings = parameter_shardings(shapes, mesh)
    if config.optimizer.offload_moments:
        shardings = shardings._replace(opt_state=moments_on_host(shapes.opt_state, shardings.opt_state))
    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    trained, _ = split_frozen(config.lora, abstract_state.params)
    gather = ParameterGather(abstract_state.params, mesh, compute_dtype=config.model.compute_dtype)
    of_batch, of_scalar = batch_sharding(mesh), replicated(mesh)
    context = StepContext(
        config=config,
        graphdef=nnx.split(nnx.eval_shape(model), nnx.Param)[0],
        gather=gather,
        optimizer=optimizer,
        schedule=make_schedule(config.optimizer, config.num_steps, schedule_from),
        exp_logits=plan.loss.exp_logits(plan.target),
        shardings=shardings,
        batch_sharding=of_batch,
    )
    abstract_batch = functools.partial(_abstract_batch, config, mesh, plan.sequence_sharding)
    return StepFunctions(
        mesh=mesh,
        graphdef=context.graphdef,
        abstract_state=abstract_state,
        abstract_gradient=trained
        if config.gradient_accumulation == 1
        else split_frozen(config.lora, gather.abstract_whole)[0],
        abstract_batch=abstract_batch(config.batch_size),
        abstract_eval_batch=abstract_batch(config.batch_size // config.gradient_accumulation),
        init_state=jax.jit(init, out_shardings=shardings),
        init_trained=jax.jit(
            lambda: split_frozen(config.lora, init().params)[0],
            out_shardings=split_frozen(config.lora, shardings.params)[0],
        ),
        begin_state=jax.jit(
            functools.partial(begin_state, config, optimizer),
            in_shardings=(shardings.params,),
            out_shardings=shardings,
            donate_argnums=0,
        ),
        train_step=jax.jit(
            functools.partial(train_step, context),
            in_shardings=(shardings, of_batch),
            out_shardings=(shardings, of_scalar),
            donate_argnums=0,
            compiler_options=compiler_options(mesh),
        ),
        gradients=jax.jit(
            functools.partial(mean_loss_gradient, context),
            in_shardings=(shardings.params, of_batch),
            out_shardings=(split_frozen(config.lora, shardings.params)[0], of_scalar),
        ),
        eval_step=jax.jit(
            functools.partial(eval_step, context),
            in_shardings=(shardings.params, of_batch, shardings.step),
            out_shardings=of_scalar,
        ),
        token_step=jax.jit(
            functools.partial(token_step, context), in_shardings=(shardings.params, of_batch), out_shardings=of_scalar
        ),
    )


def make_model(config: TrainConfig, mesh: Mesh, plan: Plan) -> GPT:
    """The model with fresh parameters, adapters among them, sharded over the mesh."""
    sharding = ActivationSharding(
        mesh,
        sequence_sharding=plan.sequence_sharding,
        exchange=config.context.exchange,
        collectives=config.tensor.collectives,
    )
    rngs = nnx.Rngs(config.seed)
    model = GPT(config.model, rngs=rngs, activation_sharding=sharding)
    add_adapters(model, config.lora, rngs)
    return model


def init_state(config: TrainConfig, model: Callable[[], GPT], optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, with the parameters of a fresh model."""
    params = nnx.to_pure_dict(nnx.state(model(), nnx.Param))
    return begin_state(config, optimizer, with_frozen_dtype(config.lora, params))


def begin_state(config: TrainConfig, optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step, with given parameters."""
    skipping = jax.tree.map(jnp.asarray, Skipping())
    trained, _ = split_frozen(config.lora, params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trained), skipping)


def compiler_options(mesh: Mesh) -> dict[str, str | bool] | None:
    """XLA's compiler options for a step on a mesh; None: its defaults.

    Within CUDA graphs, steps whose GPUs wait for each other in each layer were slower: "Training on four H200s" in
    docs/benchmarks.md.
    """
    waits = max(mesh.shape["tensor"], mesh.shape["context"]) > 1
    return WITHOUT_CUDA_GRAPHS if waits and mesh.devices.flat[0].platform == "gpu" else None


def _abstract_batch(
    config: TrainConfig, mesh: Mesh, sequence_sharding: SequenceSharding, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    shape, sharding = (batch_size, config.sequence_length), batch_sharding(mesh)
    dtypes = BATCH_DTYPES if sequence_sharding == "contiguous" else BATCH_DTYPES | {"token_order": jnp.int32}
    dtypes = dtypes | TREE_DTYPES if config.data.source == "trees" else dtypes
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
