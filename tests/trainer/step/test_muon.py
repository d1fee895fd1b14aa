"""Muon against one in NumPy, matrix by matrix, and which parameters it updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from layers import GPT, GPTConfig
from trainer.config import OptimizerConfig
from trainer.step.muon import UPDATE_RMS, muon_or_adam
from trainer.step.optimizer import make_optimizer, make_schedule
from trainer.step.sharding import path_name


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Jordan's quintic iteration, in float64, on a matrix that is brought to at most as many rows as columns."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def test_updates_match_muon_in_numpy(rng):
    config = OptimizerConfig(
        kind="muon", learning_rate=0.1, num_warmup_steps=2, momentum=0.8, weight_decay=0.5, clip_norm=1e9
    )
    num_steps = 4
    # [layers, …] and [layers, experts, …]
    shapes = {"query": (3, 8, 2, 3), "output": (3, 2, 3, 8), "up": (3, 8, 12), "down": (3, 2, 5, 8)}
    matrices = {"query": (8, 6), "output": (6, 8), "up": (8, 12), "down": (2, 5, 8)}
    stacks = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    gradients = [{name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(num_steps)]

    def as_params(arrays):
        blocks = {
            "attention": {name: {"kernel": jnp.asarray(arrays[name], jnp.float32)} for name in ("query", "output")},
            "mlp": {
                "up": {"kernel": jnp.asarray(arrays["up"], jnp.float32)},
                "experts": {"down": {"kernel": jnp.asarray(arrays["down"], jnp.float32)}},
            },
        }
        return {"blocks": {0: blocks}}

    optimizer, schedule = make_optimizer(config, num_steps), make_schedule(config, num_steps)
    actual = as_params(stacks)
    state, update = optimizer.init(actual), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(as_params(gradient), state, actual)
        actual = optax.apply_updates(actual, updates)

    for name, shape in matrices.items():
        for layer in range(3):
            weights, momentum = stacks[name][layer].reshape(shape), np.zeros(shape)
            for step, gradient in enumerate(gradients):
                g = gradient[name][layer].reshape(shape)
                momentum = config.momentum * momentum + g
                each = (g + config.momentum * momentum).reshape(-1, *shape[-2:])
                direction = np.stack([orthogonalized(matrix) for matrix in each]).reshape(shape)
                direction *= UPDATE_RMS * max(shape[-2:]) ** 0.5
                weights = weights - float(schedule(step)) * (direction + config.weight_decay * weights)
            block = actual["blocks"][0]
            places = {"up": block["mlp"], "down": block["mlp"]["experts"]}
            stack = places.get(name, block["attention"])[name]["kernel"]
            np.testing.assert_allclose(stack[layer].reshape(shape), weights, rtol=1e-3, atol=1e-3)


def test_an_update_is_of_adamws_size(rng):
    # The singular values of Newton–Schulz's matrices lie between about 0.7 and 1.2.
    stack = {"blocks": {0: {"mlp": {"up": {"kernel": jnp.asarray(rng.standard_normal((2, 64, 96)), jnp.float32)}}}}}
    config = OptimizerConfig(kind="muon", learning_rate=1.0, num_warmup_steps=0, weight_decay=0)
    optimizer = make_optimizer(config, 1000)
    updates, _ = optimizer.update(stack, optimizer.init(stack), stack)
    (update,) = jax.tree.leaves(updates)
    for matrix in np.asarray(update):
        # An orthogonal matrix of 64 × 96 has a root mean square of 1/√96.
        assert np.sqrt(np.mean(matrix**2)) == pytest.approx(0.2, rel=0.3)


def test_muon_updates_the_matrices_of_blocks_and_adam_all_else():
    config = GPTConfig(
        64, num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32, mlp="swiglu",
        qk_norm="per_head", sinks=True, tie_embeddings=False, attention_bias=True, output_bias=True, mlp_bias=True,
        norm_placement="both",
    )  # fmt: skip
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))
    rules = {path_name(path): rule for path, rule in jax.tree_util.tree_flatten_with_path(muon_or_adam(params))[0]}
    kernels = [f"attention.{name}" for name in ("query", "key", "value", "output")]
    kernels += [f"mlp.{name}" for name in ("up", "gate", "down")]
    assert {name for name, rule in rules.items() if rule == "muon"} == {f"blocks.0.{name}.kernel" for name in kernels}
    shapes = jax.eval_shape(make_optimizer(OptimizerConfig(kind="muon", num_warmup_steps=1), 10).init, params)
    state = [path_name(path) for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0] if leaf.shape]
    assert all(sum(name.endswith(f".{rule}") for rule in rules) == 1 for name in state), "partition rules go by the end"
    assert len(state) == sum({"muon": 1, "adam": 2}[rule] for rule in rules.values())
    assert {"embedding.embedding", "head.kernel", "blocks.0.attention.sinks", "final_norm.scale"} <= {
        name for name, rule in rules.items() if rule == "adam"
    }
