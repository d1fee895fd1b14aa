"""Refusals of layers on a mesh, and their documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from kernels import CausalMask, MultiHeadMask
from kernels.context import attend_over_mesh
from layers import MLP, ActivationSharding, Attention

AXES = ("data", "fsdp", "tensor", "context")


def abstract_sharding(**sizes):
    """Enough of a mesh for what is checked before anything runs."""
    sizes = dict.fromkeys(AXES, 1) | sizes
    return ActivationSharding(AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 4))


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"tensor": 2}, {"num_kv_heads": 1}, "number of key/value heads 1 is not a multiple of the mesh's tensor=2"),
        ({"tensor": 2}, {"num_heads": 3, "num_kv_heads": 3}, "number of query heads 3 is not a multiple"),
        ({"context": 3}, {}, "sequence length 16 is not a multiple of the mesh's context=3"),
        ({"tensor": 2, "data": 4}, {}, "batch size 2 is not a multiple of the mesh's data × fsdp=4"),
    ],
)
def test_a_layer_says_what_does_not_divide(sizes, changes, message):
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8} | changes
    layer = Attention(32, **heads, activation_sharding=abstract_sharding(**sizes), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(layer, jax.ShapeDtypeStruct((2, 16, 32), jnp.float32))


def test_named_kernels_are_never_passed_over():
    with pytest.raises(ValueError, match=r"collectives='nccl' is not one of mosaic_gpu, xla"):
        dataclasses.replace(abstract_sharding(tensor=2), collectives="nccl")
    sharding = dataclasses.replace(abstract_sharding(tensor=2), collectives="mosaic_gpu")
    layer = MLP(32, 64, activation_sharding=sharding, rngs=nnx.Rngs(0))
    for length, message in ((16, "it is for GPUs that are known"), (17, "2 sequences of 17 tokens, or 64 heads or")):
        with pytest.raises(ValueError, match=f"collectives='mosaic_gpu' can't serve: {message}"):
            jax.eval_shape(layer, jax.ShapeDtypeStruct((2, length, 32), jnp.float32))


def test_refuses_heads_that_differ_where_heads_are_split():
    query = jnp.ones((2, 16, 4, 8))
    with pytest.raises(
        ValueError, match=r"MultiHeadMask gives each head its own.*tensor=2 one program.*set tensor to 1"
    ):
        attend_over_mesh(query, query, query, MultiHeadMask([CausalMask()] * 4), abstract_sharding(tensor=2).layout)


def test_hashed_segment_ids_keep_documents_apart(rng):
    mesh = jax.make_mesh((1,) * 4, AXES, (AxisType.Auto,) * 4, devices=jax.devices()[:1])
    x = jnp.asarray(rng.standard_normal((1, 6, 2, 8)), jnp.float32)
    small = np.array([[1, 1, 2, 2, 3, 3]])
    attended = [
        attend_over_mesh(x, x, x, None, ActivationSharding(mesh).layout, segment_ids=ids, implementation="reference")
        for ids in (small, 2**32 * small + 5)
    ]
    np.testing.assert_array_equal(*attended)


def test_refuses_a_mesh_without_its_axes():
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"has axes \('data', 'tensor'\) and lacks fsdp, context; add it, with size 1"):
        ActivationSharding(mesh)


def test_refuses_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((1,) * 4, AXES, (AxisType.Explicit,) * 4, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"axes are all of type Auto.*pass axis_types=\(AxisType.Auto,\) \* 4"):
        ActivationSharding(mesh)
