"""A step that trains adapters: its gradients, its updates, and what it doesn't make."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from layers import LoRAConfig, MoEConfig
from layers.lora import merge_adapters
from tests.trainer.step.sharded_steps import ADAMW, FLOAT64, MODEL, make_batch, make_config, put
from trainer.config import MeshConfig, OptimizerConfig
from trainer.step.frozen import split_frozen, without_adapters
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh

LORA = LoRAConfig(rank=3, alpha=5.0)
GATED = dataclasses.replace(MODEL, mlp="swiglu", tie_embeddings=False)
CASES = {
    "one device": (GATED, {}, 1, LORA),
    "micro-batches over all axes": (GATED, {"data": 2, "fsdp": 2, "tensor": 2}, 2, LORA),
    "context, rematerialised": (dataclasses.replace(GATED, remat="full"), {"fsdp": 2, "context": 2}, 1, LORA),
    "a tied head that trains": (
        dataclasses.replace(MODEL, scan_layers=False),
        {"fsdp": 2, "tensor": 2},
        1,
        dataclasses.replace(LORA, embeddings=True),
    ),
    "experts": (dataclasses.replace(GATED, moe=MoEConfig(4, 2, 32)), {"fsdp": 2, "tensor": 2}, 1, LORA),
}


def functions_of(model, mesh, gradient_accumulation, lora=LoRAConfig(), optimizer=ADAMW):  # noqa: B008
    config = make_config(MeshConfig(**mesh), gradient_accumulation, model, optimizer=optimizer)
    return make_step_functions(dataclasses.replace(config, lora=lora), make_mesh(config.mesh))


def draw_state(functions, rng):
    """Random parameters, of which all matter, in a fresh state."""
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape), functions.abstract_state.params)
    placed = jax.tree.map(
        lambda x, leaf: jax.device_put(jnp.asarray(x, leaf.dtype), leaf.sharding),
        params,
        functions.abstract_state.params,
    )
    return functions.begin_state(placed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_dense_model_chained_by_hand(name, rng):
    """dA = dW Bᵀ s and dB = Aᵀ dW s, with dW of the merged matrices."""
    model, mesh, gradient_accumulation, lora = CASES[name]
    with jax.enable_x64(True):
        model = dataclasses.replace(model, **FLOAT64)
        functions = functions_of(model, mesh, gradient_accumulation, lora)
        batch = put(make_batch(rng), functions.mesh)
        params = draw_state(functions, rng).params
        found, sums = jax.device_get(functions.gradients(params, batch))
        dense = functions_of(model, mesh, gradient_accumulation)
        merged = merge_adapters(lora, jax.device_get(params))
        merged = jax.tree.map(
            lambda x, at: jax.device_put(np.asarray(x, np.float64), at), merged, dense.state_shardings.params
        )
        expected, dense_sums = jax.device_get(dense.gradients(merged, batch))
    assert float(sums.mean) == pytest.approx(float(dense_sums.mean), rel=1e-12)
    expected, params = flatten_dict(expected), flatten_dict(jax.device_get(params))
    trained = flatten_dict(found)
    assert trained.keys() == {path for path in params if path[-1] in ("a", "b", "scale")} | (
        {("embedding", "embedding")} if lora.embeddings else set()
    )
    for path, gradient in trained.items():
        wanted = expected[path] if "lora" not in path else chained(path, params, expected, lora.alpha / lora.rank)
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max(), err_msg=str(path))


def chained(path, params, dense, scale):
    """The gradient of an adapter's A or B, from the dense matrix's."""
    a, b = (np.asarray(params[*path[:-1], name]) for name in ("a", "b"))
    gradient = np.asarray(dense[*path[:-2], "kernel"])
    num_stacked = 2 if "experts" in path else 1
    stacked = a.shape[:num_stacked]
    inputs, rank = math.prod(a.shape[num_stacked:-1]), a.shape[-1]
    gradient = gradient.reshape(*stacked, inputs, -1)
    if path[-1] == "a":
        chain = np.einsum("...io,...ro->...ir", gradient, b.reshape(*stacked, rank, -1))
        return scale * chain.reshape(a.shape)
    return scale * np.einsum("...ir,...io->...ro", a.reshape(*stacked, inputs, rank), gradient).reshape(b.shape)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_update_leaves_what_is_frozen(kind, rng):
    optimizer = OptimizerConfig(kind=kind, num_warmup_steps=1, weight_decay=0.5)
    functions = functions_of(GATED, {"fsdp": 2, "tensor": 2}, 1, LORA, optimizer)
    state = draw_state(functions, rng)
    before = jax.device_get(state.params)
    after, metrics = functions.train_step(state, put(make_batch(rng), functions.mesh))
    assert bool(metrics.finite)
    trained, frozen = (flatten_dict(part) for part in split_frozen(LORA, jax.device_get(after.params)))
    before = flatten_dict(before)
    assert all((trained[path] != before[path]).any() for path in trained)
    assert {leaf.dtype for leaf in trained.values()} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in frozen.values()} == {jnp.dtype("bfloat16")}
    for path, leaf in frozen.items():
        np.testing.assert_array_equal(leaf.view(np.uint16), before[path].view(np.uint16))
    shapes = sorted(leaf.shape for leaf in trained.values())
    moments = [leaf.shape for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert len(moments) in range(len(shapes), 2 * len(shapes) + 1)
    assert set(moments) <= set(shapes)


def test_no_step_makes_a_gradient_or_a_copy_of_what_is_frozen():
    """In the program's text no array of a frozen stack's shape is float32, and none is made by a loop."""

    def mentions(lora):
        model = dataclasses.replace(GATED, compute_dtype="bfloat16", mlp_width=40, vocab_size=72, remat="full")
        functions = functions_of(model, {}, 1, lora)
        text = functions.train_step.lower(functions.abstract_state, functions.abstract_batch).as_text()
        of_stack = re.findall(r"dynamic_update_slice .*tensor<2x16x40x\w+>|tensor<2x16x40xf32>", text)
        of_head = re.findall(r"tensor<16x72xf32>", text)
        return len(of_stack), len(of_head)

    assert all(mentions(LoRAConfig())), "a dense step has them"
    assert mentions(LORA) == (0, 0)


@pytest.mark.full
def test_full_rank_trains_to_the_dense_loss(rng):
    """A batch learnt by heart: adapters of full rank can become any matrix."""
    model = dataclasses.replace(MODEL, mlp="swiglu", num_kv_heads=4)
    lora = LoRAConfig(rank=16, alpha=16.0, embeddings=True)  # 16 is the lesser side of each matrix
    batch, last = make_batch(rng), {}
    for name, each in {"dense": LoRAConfig(), "full rank": lora}.items():
        optimizer = OptimizerConfig(learning_rate=1e-2, num_warmup_steps=1, schedule="wsd", weight_decay=0.0)
        functions = functions_of(model, {}, 1, each, optimizer)
        state = functions.init_state()
        for _ in range(300):
            state, metrics = functions.train_step(state, put(batch, functions.mesh))
        last[name] = float(metrics.loss)
    assert last["dense"] < 1.0
    assert last["full rank"] == pytest.approx(last["dense"], abs=0.1)


def test_the_base_is_the_tree_without_adapters():
    functions, base = functions_of(GATED, {}, 1, LORA), functions_of(GATED, {}, 1)
    shapes = [jax.tree.map(lambda leaf: leaf.shape, each.abstract_state.params) for each in (functions, base)]
    assert without_adapters(shapes[0]) == shapes[1]
