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
from trainer.config import ContextConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.data import BatchShare
from trainer.step.functions import make_step_functions
from trainer.step.global_batch import make_global_batch, rows_of_process
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
    "tensor": (MeshConfig(tensor=2), 2),
}
# An epsilon far above the gradient's rounding: Adam would make a whole update of an entry that is nearly 0.
ADAMW = OptimizerConfig(num_warmup_steps=1, epsilon=1e-5)
MUON = OptimizerConfig(kind="muon", num_warmup_steps=1, epsilon=1e-5)
# Three layers don't divide into these meshes. On the first, `data` has no layers left to do; on the second, it has.
MUON_MESHES = {
    "muon_one_device": (MeshConfig(), MUON),
    "muon_data_fsdp_tensor": (
        MeshConfig(data=2, fsdp=2, tensor=2),
        dataclasses.replace(MUON, offload_moments=True),
    ),
    "muon_data_fsdp": (MeshConfig(data=4, fsdp=2), MUON),
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


def put(batch, mesh):
    """A batch on the devices, as a run puts it there."""
    sharding = batch_sharding(mesh)
    share = BatchShare(batch, rows_of_process(sharding, BATCH_SIZE, LENGTH), (np.zeros(0, np.int64),) * BATCH_SIZE)
    return make_global_batch(share, sharding)


def make_config(mesh_config, gradient_accumulation, model=MODEL, batch_size=BATCH_SIZE, optimizer=ADAMW):
    return TrainConfig(
        name="sharded",
        model=model,
        num_steps=4,
        sequence_length=LENGTH,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        optimizer=optimizer,
        loss=LossConfig(chunk_size=24),
        mesh=mesh_config,
        context=ContextConfig(deal="in_order"),  # as the batches are
    )


def train(mesh_config, gradient_accumulation, batches, optimizer=ADAMW, **of_model):
    model = dataclasses.replace(MODEL, **of_model)
    config = make_config(mesh_config, gradient_accumulation, model, optimizer=optimizer)
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
        state, metrics = functions.train_step(state, put(batch, mesh))
        losses.append([float(metrics.loss), float(metrics.grad_norm)])
    nats, num_targets = functions.eval_step(state.params, put(batches[0], mesh))
    report = {
        "gathered_on": sorted(num_devices),
        "gathered_difference": largest_difference(jax.device_get(whole), initial_params),
        "losses": losses,
        "evaluation": [float(nats), int(num_targets)],
        "shards": shards,
        "init_program": init.as_text(),
        "memory_kinds": {
            path_name(path): leaf.sharding.memory_kind for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
        },
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
    for name, (mesh_config, optimizer) in MUON_MESHES.items():
        remat = "offload_attention" if optimizer.offload_moments else "full"
        results[name] = train(mesh_config, 1, batches, optimizer, num_layers=3, remat=remat)
    reports = {}
    for name, (initial, state, report) in results.items():
        whole_initial, whole, _ = results["muon_one_device" if name.startswith("muon") else "one_device"]
        reports[name] = report | {
            "initial_difference": largest_difference(initial, whole_initial),
            "params_difference": largest_difference(state.params, whole.params),
            "opt_state_difference": largest_difference(state.opt_state, whole.opt_state),
        }
    sums = {gradient_accumulation: sums_over_devices(gradient_accumulation) for gradient_accumulation in (1, 4)}
    print(json.dumps({"training": reports, "sums": sums}))


def largest_difference(actual, expected) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return float(np.max([np.max(np.abs(a - b)) for a, b in pairs]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
