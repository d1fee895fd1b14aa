"""A GPT of experts: what its routers' sums are, in any order of computing, and token by token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, LocalMask
from layers import GPT, GPTConfig, MoEConfig, unroll_params

MIXTURE = MoEConfig(num_experts=5, num_experts_per_token=2, expert_width=6, router_bias=True, expert_bias=True)
# 3 layers over a pattern of 2: one layer is left over by the scan.
CONFIG = GPTConfig(
    vocab_size=64,
    num_layers=3,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp="swiglu",
    moe=MIXTURE,
    masks=(CausalMask() & LocalMask(5, 0), CausalMask()),
    implementation="reference",
)


@pytest.fixture
def config():
    """In float64, where no rounding sends a token to another expert."""
    with jax.enable_x64(True):
        yield dataclasses.replace(CONFIG, compute_dtype="float64", param_dtype="float64")


def split(config):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


@pytest.fixture
def params(rng, config):
    """Large enough for every one of them to show."""
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape)), split(config)[1])


def run(config, params, packed):
    """Hidden states, routers' sums, and the gradients of a loss of both."""
    graphdef, _ = split(config)

    def loss(params):
        hidden, sums = nnx.merge(graphdef, params).with_router_sums(
            packed.tokens, packed.segment_ids, packed.positions, counted=packed.segment_ids > 0
        )
        return jnp.sin(hidden).sum() + sums.load_balance(num_tokens=50) + sums.z_loss(), (hidden, sums)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), actual, expected)


def test_paths_and_number_of_parameters():
    shapes = split(CONFIG)[1]
    mlp = jax.tree.map(lambda leaf: leaf.shape, shapes["blocks"][0]["mlp"])
    hidden, out = {"kernel": (2, 5, 16, 6), "bias": (2, 5, 6)}, {"kernel": (2, 5, 6, 16), "bias": (2, 5, 16)}
    assert mlp == {
        "router": {"kernel": (2, 16, 5), "bias": (2, 5)},
        "experts": {"gate": hidden, "up": hidden, "down": out},
    }
    plain = MoEConfig(num_experts=3, num_experts_per_token=1, expert_width=6)
    for config in (CONFIG, dataclasses.replace(CONFIG, moe=plain), dataclasses.replace(CONFIG, moe=plain, mlp="gelu")):
        assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(split(config)[1]))


def test_scan_remat_and_unrolled_layers_agree_and_documents_are_what_they_are_alone(config, params, packed):
    expected = run(config, params, packed)
    (_, (hidden, sums)), _ = expected
    assert sums.choices.shape == (3, 5)
    assert sums.choices.sum(1).tolist() == [2 * np.sum(packed.segment_ids > 0)] * 3
    assert_same(run(dataclasses.replace(config, remat="save_matmuls", scan_layers=False), params, packed), expected)
    graphdef, _ = split(config)
    length = packed.lengths[0][0]
    alone = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, packed.tokens[:1, :length])
    assert_same(alone[0], hidden[0, :length])


def test_only_routers_keep_their_own_dtype_in_a_narrower_model():
    shapes = jax.eval_shape(lambda params: unroll_params(CONFIG, params), split(CONFIG)[1])
    dtypes = {
        ".".join(str(key.key) for key in path[2:]): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes["blocks"])[0]
        if path[-1].key == "kernel"
    }
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {"router.kernel"}
