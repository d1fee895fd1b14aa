"""Run by test_sharded_decoder.py in a process of its own, which has 8 CPU devices: all fields of a dense GPT on meshes.

Prints the sums of the loss and the largest difference of each gradient from one device's, as JSON. In float64.
"""

import json
import sys

import jax
import numpy as np

from kernels import CausalMask, LocalMask
from layers import GPTConfig, LayerOverride, RopeScaling
from tests.trainer.step.sharded_training import LENGTH, make_batch, make_config, put
from trainer.config import MeshConfig
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh, path_name

# Half of a sequence's tokens are fewer than the original context, all of them are more.
LONGROPE = RopeScaling(
    "longrope", 3.0, original_context_length=LENGTH - 8, short_factors=(1.0, 1.5), long_factors=(1.0, 4.0)
)
MODEL = GPTConfig(
    vocab_size=64,
    num_layers=3,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    mlp="clamped_swiglu",
    mlp_bias=True,
    tie_embeddings=False,
    masks=(CausalMask() & LocalMask(9, 0), CausalMask()),
    layer_overrides=(
        LayerOverride(rope_scaling=LONGROPE),
        LayerOverride(rope_base=500.0, rope_fraction=0.5, num_kv_heads=4, head_dim=8),
    ),
    rope_scaling=RopeScaling("yarn", 4.0, original_context_length=16, beta_fast=4.0),
    attention_bias=True,
    output_bias=True,
    qk_norm="whole",
    qk_norm_after_rope=True,
    query_scale=0.4,
    logits_soft_cap=3.0,
    sinks=True,
    implementation="reference",
    remat="save_attention",
    norm_placement="both",
    norm_scale_offset=1.0,
    embedding_scale=4.0,
    final_logits_soft_cap=2.0,
    compute_dtype="float64",
    param_dtype="float64",
)
# The mesh, and micro-batches to an update.
MESHES = {
    "one device": (MeshConfig(), 1),
    "data, fsdp and tensor": (MeshConfig(data=2, fsdp=2, tensor=2), 2),
    "fsdp, tensor and context": (MeshConfig(fsdp=2, tensor=2, context=2), 1),
}


def gradients_of(mesh_config, gradient_accumulation, batch, rng):
    config = make_config(mesh_config, gradient_accumulation, MODEL)
    functions = make_step_functions(config, make_mesh(mesh_config))
    params = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(0, 0.3, leaf.shape), leaf.sharding), functions.abstract_state.params
    )
    gradients, sums = functions.gradients(params, put(batch, functions.mesh))
    found = jax.tree_util.tree_flatten_with_path(jax.device_get(gradients))[0]
    return {path_name(path): leaf for path, leaf in found}, [float(sums.total), float(sums.nats)]


def main(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, seed_of_params = make_batch(rng), int(rng.integers(2**31))
    results = {name: gradients_of(*case, batch, np.random.default_rng(seed_of_params)) for name, case in MESHES.items()}
    expected, _ = results["one device"]
    report = {
        name: {
            "sums": sums,
            "differences": {
                path: float(np.abs(gradient - expected[path]).max() / np.abs(expected[path]).max())
                for path, gradient in gradients.items()
            },
        }
        for name, (gradients, sums) in results.items()
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
