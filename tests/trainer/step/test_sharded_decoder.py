"""A GPT with every field of a dense one set trains on meshes of eight CPU devices as on one. In float64."""

import numpy as np
import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig, LayerOverride, RopeScaling
from tests.trainer.step.sharded_steps import FLOAT64, LENGTH, PLAIN, SIZES, draw_params, gradients_on, make_batch
from trainer.config import MeshConfig


@pytest.mark.usefixtures("eight_devices", "float64")
def test_loss_and_gradients_are_those_of_one_device(rng):
    # Half of a sequence's tokens are fewer than the original context, all of them are more.
    longrope = RopeScaling(
        "longrope", 3.0, original_context_length=LENGTH - 8, short_factors=(1.0, 1.5), long_factors=(1.0, 4.0)
    )
    overrides = (
        LayerOverride(rope_scaling=longrope),
        LayerOverride(rope_base=500.0, rope_fraction=0.5, num_kv_heads=4, head_dim=8),
    )
    mlp = {"mlp": "clamped_swiglu", "mlp_width": 24, "mlp_bias": True}
    attention = {"attention_bias": True, "output_bias": True, "qk_norm": "whole", "qk_norm_after_rope": True}
    attention |= {"query_scale": 0.4, "logits_soft_cap": 3.0, "sinks": True, "layer_overrides": overrides}
    rope = {"rope_scaling": RopeScaling("yarn", 4.0, original_context_length=16, beta_fast=4.0)}
    norms = {"norm_placement": "both", "norm_scale_offset": 1.0}
    ends = {"tie_embeddings": False, "embedding_scale": 4.0, "final_logits_soft_cap": 2.0}
    how = {"masks": (CausalMask() & LocalMask(9, 0), CausalMask()), "remat": "save_attention"}
    sizes = SIZES | PLAIN | FLOAT64 | {"num_layers": 3}
    model = GPTConfig(**(sizes | mlp | attention | rope | norms | ends | how))
    params, batch = draw_params(rng, model), make_batch(rng)
    expected, expected_sums = gradients_on(MeshConfig(), 1, model, params, batch)
    # Embedding, head and final norm; for each of two stacks 4 + 3 kernels with biases, 6 norms and the sinks.
    assert len(expected) == 3 + 2 * (2 * 7 + 6 + 1)
    for mesh, accumulation in ((MeshConfig(data=2, fsdp=2, tensor=2), 2), (MeshConfig(fsdp=2, tensor=2, context=2), 1)):
        found, sums = gradients_on(mesh, accumulation, model, params, batch)
        assert sums == pytest.approx(expected_sums, rel=1e-12), mesh
        for name, gradient in expected.items():
            assert np.abs(found[name] - gradient).max() < 1e-10 * np.abs(gradient).max(), (mesh, name)
