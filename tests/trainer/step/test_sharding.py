"""The mesh fits its devices or says why not, and the rules cover every parameter of every model."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import CausalMask
from layers import GPT, GPTConfig, LayerOverride
from trainer.config import MeshConfig, OptimizerConfig
from trainer.step.optimizer import make_optimizer
from trainer.step.sharding import (
    AXES,
    PARTITION_RULES,
    batch_sharding,
    bytes_per_device,
    make_mesh,
    parameter_shardings,
    partition_spec,
    path_name,
)

MESH = AbstractMesh((1, 2, 2, 1), AXES)
SIZES = {"num_layers": 3, "width": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_width": 32}


def abstract_params(**options):
    config = GPTConfig(vocab_size=64, **SIZES, **options)
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))


def test_mesh_has_the_axes_in_order():
    mesh = make_mesh(MeshConfig())
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (1, 1, 1, 1)


def test_a_mesh_larger_than_the_devices_is_refused():
    count = len(jax.devices())
    with pytest.raises(
        ValueError, match=rf"data=1 × fsdp={count} × tensor=1 × context=2 needs {2 * count} device\(s\), got {count}"
    ):
        make_mesh(MeshConfig(fsdp=count, context=2))


def test_devices_given_must_all_be_used():
    with pytest.raises(ValueError, match=r"needs 1 device\(s\), got 2 .* product is 2"):
        make_mesh(MeshConfig(), devices=jax.devices()[:1] * 2)


@pytest.mark.parametrize(
    "options",
    [
        {"tie_embeddings": True, "mlp": "gelu"},
        {"tie_embeddings": False, "mlp": "swiglu", "qk_norm": "per_head", "sinks": True},
        {"attention_bias": True, "output_bias": True, "mlp_bias": True, "mlp": "geglu", "qk_norm": "whole"},
        {"norm_placement": "both", "masks": (CausalMask(),), "layer_overrides": (LayerOverride(head_dim=8),) * 3},
    ],
)
def test_every_parameter_and_moment_has_a_rule(options):
    params = abstract_params(**options)
    shardings = parameter_shardings(params, MESH)
    state = jax.eval_shape(make_optimizer(OptimizerConfig(num_warmup_steps=1), 10).init, params)
    of_state = jax.tree_util.tree_flatten_with_path(parameter_shardings(state, MESH))[0]
    specs = {path_name(path): sharding.spec for path, sharding in of_state}
    moments = scalars = 0
    for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]:
        for moment in ("mu", "nu"):
            assert specs.pop(f"1.{moment}.{path_name(path)}") == sharding.spec
            moments += 1
    for spec in specs.values():
        assert spec == P()
        scalars += 1
    assert moments == 2 * len(jax.tree.leaves(params))
    assert scalars == 2  # Adam's count and the schedule's


def test_where_parameters_lie():
    specs = {
        path_name(path): sharding.spec
        for path, sharding in jax.tree_util.tree_flatten_with_path(
            parameter_shardings(abstract_params(tie_embeddings=False), MESH)
        )[0]
    }
    state_axes = ("fsdp", "context")
    assert specs["embedding.embedding"] == P("tensor", state_axes)
    assert specs["head.kernel"] == P(state_axes, "tensor")
    assert specs["blocks.0.attention.query.kernel"] == P(None, state_axes, "tensor", None)
    assert specs["blocks.0.attention.output.kernel"] == P(None, "tensor", None, state_axes)
    assert specs["blocks.0.mlp.down.kernel"] == P(None, "tensor", state_axes)
    assert specs["blocks.0.mlp_norm.scale"] == P(None, None)


def test_a_device_holds_its_share_over_fsdp_and_context():
    mesh = AbstractMesh((2, 2, 2, 4), AXES)
    kernel = jax.ShapeDtypeStruct(
        (16, 64), jnp.float32, sharding=NamedSharding(mesh, partition_spec("head.kernel", (16, 64), mesh))
    )
    assert bytes_per_device({"head": kernel}) == kernel.size * 4 // (2 * 2 * 4)


def test_the_layer_dim_is_never_split():
    specs = [spec for pattern, spec in PARTITION_RULES if pattern.startswith("blocks")]
    assert specs
    assert all(spec[0] is None for spec in specs)


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"no partition rule matches .*'blocks\.0\.mixer\.kernel'.*PARTITION_RULES"):
        parameter_shardings({"blocks": {0: {"mixer": {"kernel": jnp.zeros((3, 4))}}}}, MESH)


def test_a_name_that_only_ends_alike_is_refused():
    with pytest.raises(ValueError, match="no partition rule"):
        partition_spec("overhead.kernel", (4, 4), MESH)


def test_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"is for 2 dims, but 'head\.kernel' has shape \(4, 4, 4\)"):
        partition_spec("head.kernel", (4, 4, 4), MESH)


def test_a_dim_that_its_axis_does_not_divide_is_refused():
    told = (
        r"dim 0 of 'head\.kernel' has length 15, which mesh\.fsdp × mesh\.context = 2 does not divide; make it 16, or "
    )
    with pytest.raises(ValueError, match=told):
        partition_spec("head.kernel", (15, 8), MESH)
    with pytest.raises(ValueError, match=r"dim 1 .* has length 9, which mesh\.tensor = 2 does not divide; make it 10"):
        partition_spec("head.kernel", (16, 9), MESH)


def test_batches_split_over_data_fsdp_and_context():
    assert batch_sharding(MESH).spec == P(("data", "fsdp"), "context")
