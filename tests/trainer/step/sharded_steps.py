"""Batches and configs of steps that test_sharded_training.py and others run on meshes of eight CPU devices."""

import jax
import numpy as np

from kernels import CausalMask
from layers import GPTConfig
from trainer.config import ContextConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.data import BatchShare, SequenceSharder
from trainer.step.functions import make_step_functions
from trainer.step.global_batch import indices_of_process, make_global_batch
from trainer.step.sharding import batch_sharding, make_mesh, path_name

BATCH_SIZE, LENGTH, VOCAB_SIZE = 8, 32, 64
SIZES = {"vocab_size": VOCAB_SIZE, "num_layers": 2, "width": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
PLAIN = {"masks": (CausalMask(),), "implementation": "reference"}
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64"}
MODEL = GPTConfig(**SIZES, **PLAIN, mlp_width=48, compute_dtype="float32")
# An epsilon far above the gradient's rounding: Adam would make a whole update of an entry that is nearly 0.
ADAMW = OptimizerConfig(num_warmup_steps=1, epsilon=1e-5)


def make_batch(rng, length=LENGTH):
    shape = BATCH_SIZE, length
    segment_ids = np.sort(rng.integers(1, 4, shape), axis=1).astype(np.int32)
    for row, num_tokens in enumerate(rng.integers(3, length + 1, BATCH_SIZE)):
        segment_ids[row, num_tokens:] = 0
    return {
        "tokens": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),
        "targets": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),
        "weights": (segment_ids != 0).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": np.tile(np.arange(length, dtype=np.int32), (BATCH_SIZE, 1)),
    }


def in_order_of_ranks(batch, config, sequence_sharding):
    """A batch as the data pipeline hands it to a run."""
    shard = SequenceSharder.of(config, sequence_sharding)
    sequences = [shard({name: array[row] for name, array in batch.items()}) for row in range(config.batch_size)]
    return {name: np.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}


def put(batch, mesh):
    """A batch on the devices, as a run puts it there."""
    sharding, shape = batch_sharding(mesh), batch["tokens"].shape
    share = BatchShare(batch, indices_of_process(sharding, *shape), (np.zeros(0, np.int64),) * shape[0])
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
        context=ContextConfig(sequence_sharding="contiguous"),  # as the batches are
    )


def draw_params(rng, model):
    """Parameters of a model, whatever mesh they will lie on."""
    shapes = make_step_functions(make_config(MeshConfig(), 1, model), make_mesh(MeshConfig())).abstract_state.params
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape), shapes)


def gradients_on(mesh_config, gradient_accumulation, model, params, batch):
    """Gradients of all parameters by their paths, and the sums of the loss."""
    config = make_config(mesh_config, gradient_accumulation, model, batch_size=len(batch["tokens"]))
    functions = make_step_functions(config, make_mesh(mesh_config))
    params = jax.device_put(params, functions.state_shardings.params)
    gradients, sums = functions.gradients(params, put(batch, functions.mesh))
    by_path = jax.tree_util.tree_flatten_with_path(jax.device_get(gradients))[0]
    gradients = {path_name(path): leaf for path, leaf in by_path}
    return gradients, {name: float(value) for name, value in sums._asdict().items() if value is not None}


def largest_difference(found, expected) -> float:
    """Of two trees of arrays. NaN is the largest."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return float(np.max([np.max(np.abs(a - b)) for a, b in pairs]))
