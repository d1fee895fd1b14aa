"""Run by test_sharded_training.py in a process of its own, which has 8 CPU devices: trains on meshes, prints JSON."""

import dataclasses
import json
import re
import sys

import jax
import numpy as np

from kernels import CausalMask
from layers import GPTConfig
from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module
from trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.step.functions import make_step_functions
from trainer.step.sharding import STATE_AXES, batch_sharding, make_mesh, on_one_device, path_name

BATCH_SIZE, LENGTH, VOCAB_SIZE = 8, 32, 64
MODEL = GPTConfig(
    vocab_size=VOCAB_SIZE,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=48,
    masks=(CausalMask(),),
    implementation="reference",
    compute_dtype="float32",
)
MESHES = {
    "one_device": (MeshConfig(), 1),
    "data_fsdp_tensor": (MeshConfig(data=2, fsdp=2, tensor=2), 2),
    "fsdp_tensor_context": (MeshConfig(fsdp=2, tensor=2, context=2), 1),
    "data_fsdp_context": (MeshConfig(data=2, fsdp=2, context=2), 2),
}


def make_batch(rng):
    segment_ids = np.sort(rng.integers(1, 4, (BATCH_SIZE, LENGTH)), axis=1).astype(np.int32)
    for row, num_tokens in enumerate(rng.integers(3, LENGTH + 1, BATCH_SIZE)):
        segment_ids[row, num_tokens:] = 0
    return {
        "tokens": rng.integers(0, VOCAB_SIZE, (BATCH_SIZE, LENGTH)).astype(np.int32),
        "targets": rng.integers(0, VOCAB_SIZE, (BATCH_SIZE, LENGTH)).astype(np.int32),
        "target_mask": segment_ids != 0,
        "segment_ids": segment_ids,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH_SIZE, 1)),
    }


def make_config(mesh_config, gradient_accumulation, model=MODEL, batch_size=BATCH_SIZE):
    return TrainConfig(
        name="sharded",
        model=model,
        num_steps=4,
        sequence_length=LENGTH,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        optimizer=OptimizerConfig(num_warmup_steps=1),
        loss=LossConfig(chunk_size=24),
        mesh=mesh_config,
    )


def train(mesh_config, gradient_accumulation, batches):
    config = make_config(mesh_config, gradient_accumulation)
    mesh = make_mesh(config.mesh)
    functions = make_step_functions(config, mesh)
    init = functions.init_state.lower().compile()
    state = initial = init()
    initial_params = jax.device_get(initial.params)
    shards = {
        path_name(path): [leaf.shape, leaf.addressable_shards[0].data.shape]
        for path, leaf in jax.tree_util.tree_flatten_with_path(initial)[0]
    }
    whole = on_one_device(initial.params, mesh)
    num_devices = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(whole)}
    losses = []
    for batch in batches:
        state, metrics = functions.train_step(state, jax.device_put(batch, batch_sharding(mesh)))
        losses.append([float(metrics.loss), float(metrics.grad_norm)])
    nats, num_targets = functions.eval_step(state.params, jax.device_put(batches[0], batch_sharding(mesh)))
    report = {
        "gathered_on": sorted(num_devices),
        "gathered_difference": largest_difference(jax.device_get(whole), initial_params),
        "losses": losses,
        "evaluation": [float(nats), int(num_targets)],
        "shards": shards,
        "init_program": init.as_text(),
        "state_keeps_its_shardings": jax.tree.map(lambda leaf: leaf.sharding, state) == functions.state_shardings,
    }
    return initial_params, jax.device_get(state), report


def sums_over_devices(gradient_accumulation):
    """What one update on bfloat16 matrices sums over devices: types before XLA, executions and bytes after it."""
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    # Without `context`: what attention sends is not of the parameters.
    config = make_config(MeshConfig(data=2, fsdp=4), gradient_accumulation, model, batch_size=32)
    functions = make_step_functions(config, make_mesh(config.mesh))
    lowered = functions.train_step.lower(functions.abstract_state, functions.abstract_batch)
    operands = re.findall(
        r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?\}\) : \(tensor<([^>]*)>', lowered.as_text(), re.DOTALL
    )
    totals = count_collectives(parse_module(lowered.compile().as_text()))
    return {
        "element_types": sorted({operand.rpartition("x")[2] for operand in operands}),
        "num_matrix_parameters": sum(
            leaf.size for leaf in jax.tree.leaves(functions.abstract_state.params) if STATE_AXES in leaf.sharding.spec
        ),
        "collectives": {total.operation: [total.count, total.bytes, total.is_exact] for total in totals},
    }


def main(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [make_batch(rng) for _ in range(3)]
    results = {name: train(*mesh, batches) for name, mesh in MESHES.items()}
    whole_initial, whole, _ = results["one_device"]
    reports = {}
    for name, (initial, state, report) in results.items():
        reports[name] = report | {
            "initial_difference": largest_difference(initial, whole_initial),
            "params_difference": largest_difference(state.params, whole.params),
            "opt_state_difference": largest_difference(state.opt_state, whole.opt_state),
        }
    sums = {gradient_accumulation: sums_over_devices(gradient_accumulation) for gradient_accumulation in (1, 4)}
    print(json.dumps({"training": reports, "sums": sums}))


def largest_difference(actual, expected) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


if __name__ == "__main__":
    main(int(sys.argv[1]))
