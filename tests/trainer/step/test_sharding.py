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
    told = rf"data=1 × fsdp={count} × tensor=1 × context=2 needs {2 * count} device\(s\), got {count}"
    with pytest.raises(ValueError, match=told):
        make_mesh(MeshConfig(fsdp=count, context=2))


def test_devices_given_must_all_be_used():
    with pytest.raises(ValueError, match=r"needs 1 device\(s\), got 2 .* product is 2"):
        make_mesh(MeshConfig(), devices=jax.devices()[:1] * 2)


def specs_of(tree) -> dict[str, P]:
    """Where the leaves of a tree lie on the mesh."""
    shardings = jax.tree_util.tree_flatten_with_path(parameter_shardings(tree, MESH))[0]
    return {path_name(path): sharding.spec for path, sharding in shardings}


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
    state = jax.eval_shape(make_optimizer(OptimizerConfig(num_warmup_steps=1), 10).init, params)
    of_params, of_state = specs_of(params), specs_of(state)
    moments = {f"1.{moment}.{name}": spec for name, spec in of_params.items() for moment in ("mu", "nu")}
    assert len(of_params) == len(jax.tree.leaves(params))
    assert moments.items() <= of_state.items()
    # Adam's count and the schedule's.
    assert [of_state[name] for name in of_state.keys() - moments.keys()] == [P(), P()]


def test_where_parameters_lie():
    specs = specs_of(abstract_params(tie_embeddings=False))
    state_axes = ("fsdp", "context")
    assert specs["embedding.embedding"] == P("tensor", state_axes)
    assert specs["head.kernel"] == P(state_axes, "tensor")
    assert specs["blocks.0.attention.query.kernel"] == P(None, state_axes, "tensor", None)
    assert specs["blocks.0.attention.output.kernel"] == P(None, "tensor", None, state_axes)
    assert specs["blocks.0.mlp.down.kernel"] == P(None, "tensor", state_axes)
    assert specs["blocks.0.mlp_norm.scale"] == P(None, None)


def test_a_device_holds_its_share_over_fsdp_and_context():
    mesh = AbstractMesh((2, 2, 2, 4), AXES)
    sharding = NamedSharding(mesh, partition_spec("head.kernel", (16, 64), mesh))
    kernel = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=sharding)
    assert bytes_per_device({"head": kernel}) == kernel.size * 4 // (2 * 2 * 4)


def test_the_layer_dim_is_never_split():
    specs = [spec for pattern, spec in PARTITION_RULES if pattern.startswith("blocks")]
    assert specs
    assert all(spec[0] is None for spec in specs)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blocks.0.mixer.kernel", (3, 4), r"no partition rule matches .*'blocks\.0\.mixer\.kernel'.*PARTITION_RULES"),
        ("overhead.kernel", (4, 4), "no partition rule"),  # a name that only ends alike
        ("head.kernel", (4, 4, 4), r"is for 2 dims, but 'head\.kernel' has shape \(4, 4, 4\)"),
        (
            "head.kernel",
            (15, 8),
            r"dim 0 of 'head\.kernel' has length 15, which mesh\.fsdp × mesh\.context = 2 does not divide; make it 16",
        ),
        ("head.kernel", (16, 9), r"dim 1 .* has length 9, which mesh\.tensor = 2 does not divide; make it 10"),
    ],
)
def test_a_parameter_that_no_rule_can_split_is_refused(name, shape, message):
    with pytest.raises(ValueError, match=message):
        partition_spec(name, shape, MESH)


def test_batches_split_over_data_fsdp_and_context():
    assert batch_sharding(MESH).spec == P(("data", "fsdp"), "context")
