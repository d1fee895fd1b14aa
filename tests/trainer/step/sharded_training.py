"""Run by test_sharded_training.py in a process of its own, which has 8 CPU devices: trains on meshes, prints JSON."""

import json
import sys

import jax
import numpy as np

from kernels import CausalMask
from layers import GPTConfig
from trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.data import BatchShare
from trainer.step.functions import make_step_functions
from trainer.step.global_batch import make_global_batch, rows_of_process
from trainer.step.sharding import batch_sharding, make_mesh, on_one_device, path_name

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


def train(mesh_config, gradient_accumulation, batches):
    config = TrainConfig(
        name="sharded",
        model=MODEL,
        num_steps=4,
        sequence_length=LENGTH,
        batch_size=BATCH_SIZE,
        gradient_accumulation=gradient_accumulation,
        optimizer=OptimizerConfig(num_warmup_steps=1),
        loss=LossConfig(chunk_size=24),
        mesh=mesh_config,
    )
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
        "state_keeps_its_shardings": jax.tree.map(lambda leaf: leaf.sharding, state) == functions.state_shardings,
    }
    return initial_params, jax.device_get(state), report


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
    print(json.dumps(reports))


def largest_difference(actual, expected) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


if __name__ == "__main__":
    main(int(sys.argv[1]))
