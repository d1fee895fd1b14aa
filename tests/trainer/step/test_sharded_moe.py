"""A mixture of experts on meshes of eight CPU devices is that on one. In float64, where no rounding sends a token to
another expert.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layers import ActivationSharding, GPTConfig, MoE, MoEConfig
from tests.trainer.step.sharded_steps import (
    FLOAT64,
    LENGTH,
    PLAIN,
    SIZES,
    draw_params,
    gradients_on,
    largest_difference,
    make_batch,
)
from trainer.config import MeshConfig
from trainer.step.muon import orthogonalize
from trainer.step.sharding import make_mesh, parameter_shardings

pytestmark = pytest.mark.usefixtures("eight_devices", "float64")

WEIGHTS = {"load_balance_loss_weight": 0.7, "router_z_loss_weight": 0.3}
MIXTURE = MoEConfig(4, 2, expert_width=6, router_bias=True, expert_bias=True, **WEIGHTS)


def test_losses_and_gradients_are_those_of_one_device(rng):
    model = GPTConfig(**SIZES, **PLAIN, **FLOAT64, mlp="clamped_swiglu", moe=MIXTURE)
    params, batch = draw_params(rng, model), make_batch(rng)
    of_one = {}
    # The mesh, and micro-batches to an update.
    for mesh, accumulation in ((MeshConfig(fsdp=2, tensor=2, context=2), 1), (MeshConfig(data=2, fsdp=2, tensor=2), 2)):
        gradients, sums = gradients_on(MeshConfig(), accumulation, model, params, batch)
        found_gradients, found_sums = gradients_on(mesh, accumulation, model, params, batch)
        assert found_sums == pytest.approx(sums, rel=1e-12)
        assert largest_difference(found_gradients, gradients) < 1e-12
        of_one[accumulation] = sums
    # Loads are counted in each micro-batch, and all else is a plain sum over tokens.
    whole, split = of_one.values()
    assert {name for name in whole if whole[name] != pytest.approx(split[name], rel=1e-12)} == {"mean", "load_balance"}


def test_a_layer_counts_all_tokens_of_its_mesh(rng):
    """Outside of a trainer's `jax.shard_map`: outputs, sums and gradients."""
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, context=2))
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: MoE(16, MIXTURE, rngs=nnx.Rngs(0)))))
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape), shapes)
    inputs, counted = rng.standard_normal((4, LENGTH, 16)), rng.random((4, LENGTH)) < 0.5

    def apply(sharding, params, inputs, counted):
        options = {**FLOAT64, "activation_sharding": sharding}
        graphdef = nnx.split(nnx.eval_shape(lambda: MoE(16, MIXTURE, **options, rngs=nnx.Rngs(0))))[0]

        @jax.jit
        def run(params, inputs, counted):
            def loss(params, inputs):
                outputs, sums = nnx.merge(graphdef, params)(inputs, counted)
                return jnp.sin(outputs).sum() + sums.load_balance(num_tokens=9) + sums.z_loss(), (outputs, sums)

            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, inputs)

        return jax.device_get(run(params, inputs, counted))

    placed = jax.device_put((inputs, counted), NamedSharding(mesh, P(("data", "fsdp"), "context")))
    on_mesh, on_one = apply(ActivationSharding(mesh), params, *placed), apply(None, params, inputs, counted)
    assert largest_difference(on_mesh, on_one) < 1e-9


@pytest.mark.parametrize(
    "mesh",
    # Where fsdp alone splits a stack, and there are more layers than that, they are shared out over data.
    [MeshConfig(fsdp=2, tensor=2, context=2), MeshConfig(data=4, fsdp=2)],
)
def test_muon_orthogonalizes_each_layer_and_expert_wherever_it_lies(mesh, rng):
    mesh = make_mesh(mesh)
    experts = {"down": {"kernel": rng.standard_normal((3, 4, 6, 16))}}
    updates = {"blocks": {0: {"mlp": {"experts": experts, "up": {"kernel": rng.standard_normal((3, 16, 6))}}}}}
    placed = jax.device_put(updates, parameter_shardings(updates, mesh))
    on_mesh, on_one = (
        jax.jit(lambda updates, mesh=mesh: orthogonalize(mesh).update(updates, None)[0])(updates)
        for mesh, updates in ((mesh, placed), (None, updates))
    )
    assert largest_difference(*jax.device_get((on_mesh, on_one))) < 1e-5
    assert np.abs(on_one["blocks"][0]["mlp"]["up"]["kernel"]).max() > 1e-2
