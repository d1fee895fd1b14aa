"""What XLA makes of layers with the Mosaic GPU backend's kernels, compiled for a GPU that isn't here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, MosaicGpuTuning, Target, dot_product_attention
from layers import MoEConfig
from layers.moe import MoE
from tests.gpu_compiler import needs_gpu_compiler
from trainer.compile.topology import parse_topology


@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_a_scan_over_layers_computes_each_forward_pass_once():
    """XLA would compute it again where its output goes into the array of all layers' outputs."""
    device = parse_topology("h100:1").devices()[0]

    def layers(hidden, scales):
        def layer(hidden, scale):
            attended = dot_product_attention(
                hidden * scale, hidden, hidden, CausalMask(), device=device, implementation=MosaicGpuTuning("fused")
            )
            return hidden + attended, None

        return jax.lax.scan(layer, hidden, scales)[0].astype(jnp.float32).sum()

    on_device = jax.sharding.SingleDeviceSharding(device)
    hidden = jax.ShapeDtypeStruct((1, 1024, 4, 128), jnp.bfloat16, sharding=on_device)
    scales = jax.ShapeDtypeStruct((3,), jnp.bfloat16, sharding=on_device)
    compiled = jax.jit(jax.grad(layers)).lower(hidden, scales).compile()
    # Forward, preprocess, which writes zeros, and backward.
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 3
    assert f"f32[{hidden.size // 1024},1024]" in compiled.as_text()


@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_a_layer_that_is_made_anew_leaves_nothing_behind():
    """Not the outputs of kernels either that share out their work by a counter, as those of documents do."""
    device = parse_topology("h100:1").devices()[0]
    of_hidden, num_layers = (1, 32_768, 16, 128), 3

    def temporaries(*names):
        def layers(hidden, scales, ids):
            def layer(hidden, scale):
                x = hidden * scale
                attended = dot_product_attention(
                    x, x, x, CausalMask(), query_segment_ids=ids, key_value_segment_ids=ids, device=device
                )
                return hidden + attended, None

            policy = jax.checkpoint_policies.save_only_these_names(*names)
            return jax.lax.scan(jax.checkpoint(layer, policy=policy), hidden, scales)[0].astype(jnp.float32).sum()

        on_device = jax.sharding.SingleDeviceSharding(device)
        inputs = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)
            for shape, dtype in ((of_hidden, "bfloat16"), ((num_layers,), "bfloat16"), (of_hidden[:2], "int32"))
        )
        return jax.jit(jax.grad(layers)).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    of_outputs = num_layers * 2 * np.prod(of_hidden)
    assert temporaries("attention_output", "attention_lse") - temporaries() > 0.9 * of_outputs


@pytest.mark.full
@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_a_mixtures_features_that_are_kept_are_not_multiplied_again(monkeypatch):
    device = parse_topology("h100:1").devices()[0]
    monkeypatch.setattr(MoE, "_target", Target.of(device))
    config = MoEConfig(num_experts=4, num_experts_per_token=2, expert_width=192, expert_bias=True)
    graphdef, params = nnx.split(MoE(128, config, implementation="mosaic_gpu", rngs=nnx.Rngs(0)))

    policy = jax.checkpoint_policies.save_only_these_names("projection")

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(params, inputs):
        return nnx.merge(graphdef, params)(inputs)[0].astype(jnp.float32).sum()

    on_device = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device),
        (params, jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16)),
    )
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    # Forward: copies, features with gates, outputs. Backward: the tokens' copies again, the gradient's, that of
    # features and gates, that of tokens, and those of three matrices.
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 3 + 7


@pytest.mark.sample(1)
@needs_gpu_compiler
@pytest.mark.jax_0_11
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "tuning"), [(192, 128, None), (80, 192, MosaicGpuTuning("fused"))], ids=["192", "80"]
)
def test_a_wide_head_dim_beside_a_narrow_one_has_one_backward_kernel(head_dim, value_dim, tuning, is_packed):
    device = parse_topology("h100:1").devices()[0]

    def loss(query, key, value, ids):
        documents = {"query_segment_ids": ids, "key_value_segment_ids": ids} if is_packed else {}
        output = dot_product_attention(
            query, key, value, CausalMask(), device=device, implementation=tuning, **documents
        )
        return output.astype(jnp.float32).sum()

    on_device = jax.sharding.SingleDeviceSharding(device)
    query, value = (
        jax.ShapeDtypeStruct((1, 1024, 2, dim), jnp.bfloat16, sharding=on_device) for dim in (head_dim, value_dim)
    )
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32, sharding=on_device)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(query, query, value, ids).compile()
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 2  # a forward and a backward kernel
