"""Layers are traced under `jax_enable_x64` and strict promotion at once, which refuses what either refuses."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kernels import CausalMask, LocalMask
from layers import GPT, GPTConfig, MoEConfig, apply_rope, init_caches

SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "width": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_width": 48,
    "masks": (CausalMask(), CausalMask() & LocalMask(9, 0)),
}
MODELS = {
    "of experts": {"moe": MoEConfig(4, 2, 16)},
    "like Gemma": {"embedding_scale": 5.6, "final_logits_soft_cap": 20.0, "norm_placement": "both", "mlp": "geglu"},
    "like gpt-oss": {"moe": MoEConfig(4, 2, 16, router_bias=True, expert_bias=True), "mlp": "clamped_swiglu"},
    "in float64": {"compute_dtype": "float64", "param_dtype": "float64", "sinks": True, "qk_norm": "whole"},
}


@pytest.fixture(autouse=True)
def _x64_and_strict():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_model_trains_and_decodes(changes):
    config = GPTConfig(**SIZES | changes)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    tokens, caches = jnp.zeros((2, 12), jnp.int32), init_caches(config, 2, 32)

    def loss(params, tokens):
        model = nnx.merge(graphdef, params)
        hidden, sums = model.with_router_sums(tokens, tokens, tokens)
        of_routers = 0.0 if sums is None else jax.tree.reduce(jnp.add, [x.astype(jnp.float64).sum() for x in sums])
        return model.logits(hidden).astype(jnp.float64).sum() + of_routers

    def write(params, tokens, caches):
        model = nnx.merge(graphdef, params)
        _, caches = model.prefill(tokens, caches)
        return model.decode(tokens[:, :1], caches)

    gradients = jax.eval_shape(jax.grad(loss), params, tokens)
    assert [x.dtype for x in jax.tree.leaves(gradients)] == [x.dtype for x in jax.tree.leaves(params)]
    assert jax.eval_shape(write, params, tokens, caches)[0].dtype == config.compute_dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_rotary_embedding(dtype):
    turned = jax.eval_shape(lambda x: apply_rope(x, jnp.zeros((1, 3), jnp.int32)), jnp.ones((2, 3, 2, 8), dtype))
    assert turned.dtype == dtype
