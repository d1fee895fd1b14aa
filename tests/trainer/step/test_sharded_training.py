"""Training on meshes of eight CPU devices is training on one."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.trainer.step.sharded_steps import ADAMW, MODEL, largest_difference, make_batch, make_config, put
from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module
from trainer.config import MeshConfig, OptimizerConfig
from trainer.step.functions import StepFunctions, make_step_functions
from trainer.step.sharding import STATE_AXES, make_mesh, on_one_device, path_name

pytestmark = pytest.mark.usefixtures("eight_devices")

MUON = OptimizerConfig(kind="muon", num_warmup_steps=1, epsilon=1e-5)


class Trained(NamedTuple):
    """What came of a few steps."""

    functions: StepFunctions
    init_program: str
    initial: Any
    losses: list[list[float]]
    """Loss and gradient norm of each step."""
    evaluation: list[float]
    state: Any


def train(mesh_config, gradient_accumulation, batches, optimizer=ADAMW, **of_model):
    model = dataclasses.replace(MODEL, **of_model)
    config = make_config(mesh_config, gradient_accumulation, model, optimizer=optimizer)
    functions = make_step_functions(config, make_mesh(config.mesh))
    init = functions.init_state.lower().compile()
    state, losses = init(), []
    initial = jax.device_get(state)
    assert_parameters_can_be_had_whole(state.params, functions.mesh)
    for batch in batches:
        state, metrics = functions.train_step(state, put(batch, functions.mesh))
        losses.append([float(metrics.loss), float(metrics.grad_norm)])
    sums = functions.eval_step(state.params, put(batches[0], functions.mesh), state.step)
    evaluation = [float(x) for x in sums]
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == functions.state_shardings
    return Trained(functions, init.as_text(), initial, losses, evaluation, state)


def assert_parameters_can_be_had_whole(params, mesh):
    whole = on_one_device(params, mesh)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(whole)} == {1}
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((whole, params)))


def assert_trained_alike(found, expected):
    assert largest_difference(found.initial.params, expected.initial.params) < 1e-6
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    np.testing.assert_allclose(found.evaluation, expected.evaluation, rtol=1e-5)
    found, expected = jax.device_get((found.state, expected.state))
    assert largest_difference(found.params, expected.params) < 1e-4
    assert largest_difference(found.opt_state, expected.opt_state) < 1e-4


def shards_of(trained):
    """The shape of each array, and of one device's part of it."""
    leaves = jax.tree_util.tree_flatten_with_path(trained.state)[0]
    return {path_name(path): (leaf.shape, leaf.addressable_shards[0].data.shape) for path, leaf in leaves}


def test_training_on_meshes_is_training_on_one_device(rng, capfd):
    batches = [make_batch(rng) for _ in range(2)]
    one = train(MeshConfig(), 1, batches)
    # With test_sharded_decoder.py, each axis is there with one micro-batch and with more.
    tensor = train(MeshConfig(data=2, fsdp=2, tensor=2), 1, batches)
    context = train(MeshConfig(data=2, fsdp=2, context=2), 2, batches)
    for found in (tensor, context, train(MeshConfig(tensor=2), 2, batches)):
        assert_trained_alike(found, one)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err, "XLA's way between shardings"

    of_tensor, of_context = map(shards_of, (tensor, context))
    for prefix in ("params", "opt_state.1.mu", "opt_state.1.nu"):
        assert of_tensor[f"{prefix}.embedding.embedding"] == ((64, 16), (32, 8))
        assert of_tensor[f"{prefix}.blocks.0.attention.query.kernel"] == ((2, 16, 4, 4), (2, 8, 2, 4))
        assert of_tensor[f"{prefix}.blocks.0.attention.output.kernel"] == ((2, 4, 4, 16), (2, 2, 4, 8))
        assert of_tensor[f"{prefix}.blocks.0.mlp.down.kernel"] == ((2, 48, 16), (2, 24, 8))
        assert of_tensor[f"{prefix}.final_norm.scale"] == ((16,), (16,))
        # fsdp and context split one dim together.
        assert of_context[f"{prefix}.embedding.embedding"] == ((64, 16), (64, 4))
        assert of_context[f"{prefix}.blocks.0.mlp.down.kernel"] == ((2, 48, 16), (2, 48, 4))
        assert of_context[f"{prefix}.final_norm.scale"] == ((16,), (16,))

    # No device makes a whole parameter.
    assert "f32[64,16]" in one.init_program
    for name, (shape, shard_shape) in of_tensor.items():
        if shape != shard_shape:
            assert f"[{','.join(map(str, shape))}]" not in tensor.init_program, name


def test_muon_with_layers_spread_and_moments_on_the_host_is_muon_on_one_device(rng):
    """Three layers don't divide into this mesh."""
    batches = [make_batch(rng) for _ in range(2)]
    one = train(MeshConfig(), 1, batches, MUON, num_layers=3)
    offloading = dataclasses.replace(MUON, offload_moments=True)
    sharded = train(
        MeshConfig(data=2, fsdp=2, tensor=2), 1, batches, offloading, num_layers=3, remat="offload_attention"
    )
    assert_trained_alike(sharded, one)
    leaves = jax.tree_util.tree_flatten_with_path(sharded.state)[0]
    kinds = {path_name(path): leaf.sharding.memory_kind for path, leaf in leaves}
    moments = {name for name in kinds if any(f".{moment}." in name for moment in ("mu", "nu", "trace"))}
    assert any(".trace.blocks." in name for name in moments), "Muon's"
    assert {name for name, kind in kinds.items() if kind == "pinned_host"} == moments


def test_gradients_are_summed_in_float32_and_once_an_update():
    one, four = (sums_over_devices(gradient_accumulation) for gradient_accumulation in (1, 4))
    assert one["all-reduce"].bytes == pytest.approx(four["all-reduce"].bytes, rel=0.01)
    # One micro-batch: layer by layer, and once more where the backward pass recomputes. Four: all at once.
    assert four["all-gather"].bytes < one["all-gather"].bytes


def sums_over_devices(gradient_accumulation):
    """What one update on bfloat16 matrices sends, by the collective."""
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    # Without `context`: what attention sends is not of the parameters.
    config = make_config(MeshConfig(data=2, fsdp=4), gradient_accumulation, model, batch_size=32)
    functions = make_step_functions(config, make_mesh(config.mesh))
    lowered = functions.train_step.lower(functions.abstract_state, functions.abstract_batch)
    operands = re.findall(
        r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?\}\) : \(tensor<([^>]*)>', lowered.as_text(), re.DOTALL
    )
    assert {operand.rpartition("x")[2] for operand in operands} == {"f32", "i32"}  # i32: numbers of targets
    totals = {total.operation: total for total in count_collectives(parse_module(lowered.compile().as_text()))}
    params = jax.tree.leaves(functions.abstract_state.params)
    num_matrix_parameters = sum(leaf.size for leaf in params if STATE_AXES in leaf.sharding.spec)
    assert totals["reduce-scatter"].is_exact
    assert totals["reduce-scatter"].bytes == 4 * num_matrix_parameters
    return totals
