"""Run by test_sharded_moe.py in a process of its own, which has 8 CPU devices: a mixture of experts on meshes, as JSON.

In float64, where no rounding sends a token to another expert.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import CausalMask
from layers import ActivationSharding, GPTConfig, MoE, MoEConfig
from tests.trainer.step.sharded_training import LENGTH, largest_difference, make_batch, make_config, put
from trainer.config import MeshConfig
from trainer.step.functions import make_step_functions
from trainer.step.muon import orthogonalize
from trainer.step.sharding import make_mesh, parameter_shardings

MIXTURE = MoEConfig(
    num_experts=4,
    num_experts_per_token=2,
    expert_width=6,
    router_bias=True,
    expert_bias=True,
    load_balance_loss_weight=0.7,
    router_z_loss_weight=0.3,
)
MODEL = GPTConfig(
    vocab_size=64,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp="clamped_swiglu",
    moe=MIXTURE,
    masks=(CausalMask(),),
    implementation="reference",
    compute_dtype="float64",
    param_dtype="float64",
)
# The mesh, and micro-batches to an update.
MESHES = {
    "one device": (MeshConfig(), 1),
    "fsdp, tensor and context": (MeshConfig(fsdp=2, tensor=2, context=2), 1),
    "one device, micro-batches": (MeshConfig(), 2),
    "data, fsdp and tensor, micro-batches": (MeshConfig(data=2, fsdp=2, tensor=2), 2),
}


def draw(rng, tree):
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape), tree)


def train(mesh_config, gradient_accumulation, batch, rng):
    config = make_config(mesh_config, gradient_accumulation, MODEL)
    functions = make_step_functions(config, make_mesh(mesh_config))
    abstract = functions.abstract_state.params
    params = jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), draw(rng, abstract), abstract)
    gradients, sums = functions.gradients(params, put(batch, functions.mesh))
    return jax.device_get(gradients), {name: float(value) for name, value in sums._asdict().items()}


def apply_layer(sharding, params, inputs, counted):
    """A layer outside of a trainer's `jax.shard_map`: outputs, sums and gradients."""
    make = lambda: MoE(  # noqa: E731
        16, MIXTURE, compute_dtype="float64", param_dtype="float64", activation_sharding=sharding, rngs=nnx.Rngs(0)
    )
    graphdef = nnx.split(nnx.eval_shape(make))[0]

    @jax.jit
    def run(params, inputs, counted):
        def loss(params, inputs):
            outputs, sums = nnx.merge(graphdef, params)(inputs, counted)
            return jnp.sin(outputs).sum() + sums.load_balance(num_tokens=9) + sums.z_loss(), (outputs, sums)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, inputs)

    return jax.device_get(run(params, inputs, counted))


def main(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, seed_of_params = make_batch(rng), int(rng.integers(2**31))
    results = {name: train(*case, batch, np.random.default_rng(seed_of_params)) for name, case in MESHES.items()}

    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, context=2))
    sharding = ActivationSharding(mesh)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: MoE(16, MIXTURE, rngs=nnx.Rngs(0)))))
    params, inputs = draw(rng, shapes), rng.standard_normal((4, LENGTH, 16))
    counted = rng.random((4, LENGTH)) < 0.5
    of_tokens = NamedSharding(mesh, P(("data", "fsdp"), "context"))
    on_one, on_mesh = (
        apply_layer(None, params, inputs, counted),
        apply_layer(sharding, params, *jax.device_put((inputs, counted), of_tokens)),
    )

    updates = {"blocks": {0: {"mlp": {"experts": {"down": {"kernel": rng.standard_normal((3, 4, 6, 16))}}}}}}
    placed = jax.device_put(updates, parameter_shardings(updates, mesh))
    orthogonal = [
        jax.jit(lambda updates, mesh=mesh: orthogonalize(mesh).update(updates, None)[0])(updates)
        for mesh, updates in ((None, updates), (mesh, placed))
    ]
    print(
        json.dumps(
            {
                "sums": {name: sums for name, (_, sums) in results.items()},
                "gradients": {
                    name: largest_difference(gradients, results[name_of_one(name)][0])
                    for name, (gradients, _) in results.items()
                },
                "layer": largest_difference(on_mesh, on_one),
                "muon": largest_difference(*orthogonal),
            }
        )
    )


def name_of_one(name: str) -> str:
    """The case on one device with as many micro-batches."""
    return next(one for one in MESHES if one.startswith("one") and MESHES[one][1] == MESHES[name][1])


if __name__ == "__main__":
    main(int(sys.argv[1]))
