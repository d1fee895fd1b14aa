"""Moments in the host's memory: the same updates, kept where they are not finite, saved and restored as any."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layers import GPTConfig
from trainer.checkpoints.training_state import Checkpoints
from trainer.config import MeshConfig, OptimizerConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.step.functions import make_step_functions
from trainer.step.host_offload import moments_on_host, require_host_memory, stream_moments
from trainer.step.sharding import make_mesh

CONFIG = TrainConfig(
    name="offloaded",
    model=GPTConfig(vocab_size=64, num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32),
    num_steps=10,
    sequence_length=32,
    optimizer=OptimizerConfig(kind="muon", num_warmup_steps=1),  # whose state has Adam's moments, too
)
OFFLOADED = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, offload_moments=True))


@pytest.mark.parametrize("inner", [optax.scale_by_adam(0.9, 0.95), optax.trace(0.9, nesterov=True)])
def test_streamed_updates_are_those_of_the_whole(rng, inner):
    streamed = stream_moments(inner)
    shapes = {"kernel": (3, 4, 5), "embedding": (6, 4), "scale": (4,)}
    draw = lambda: {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}  # noqa: E731
    expected_state = state = inner.init(draw())
    assert jax.tree.structure(streamed.init(draw())) == jax.tree.structure(state)
    update = jax.jit(lambda g, state, finite: streamed.update(g, on_host(state), finite=finite))
    for _ in range(2):
        gradient = draw()
        expected, expected_state = inner.update(gradient, expected_state)
        actual, state = update(gradient, state, True)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, (actual, state), (expected, expected_state))
    _, kept = update(jax.tree.map(lambda g: g * jnp.nan, gradient), state, False)
    for after, before in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True):
        if after.shape:
            np.testing.assert_array_equal(after, before)


def on_host(state):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.shape else leaf, state)


def test_a_checkpoint_goes_on_with_moments_elsewhere(tmp_path):
    mesh = make_mesh(MeshConfig())
    here, there = (make_step_functions(config, mesh) for config in (CONFIG, OFFLOADED))
    checkpoints = Checkpoints(tmp_path, num_kept=1)
    try:
        state = there.init_state()
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == there.state_shardings
        for step, functions in ((1, here), (2, there)):
            checkpoints.save(step, state, {})
            checkpoints.wait()
            restored = checkpoints.restore_newest(lambda _, abstract=functions.abstract_state: abstract).state
            assert jax.tree.map(lambda leaf: leaf.sharding, restored) == functions.state_shardings
            jax.tree.map(np.testing.assert_array_equal, restored, state)
            state = restored
    finally:
        checkpoints.close()
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.shape}
    assert kinds == {"pinned_host"}


def test_a_device_without_the_hosts_memory_is_refused():
    memories = [SimpleNamespace(kind="device")]
    device = SimpleNamespace(device_kind="TPU v3", platform="tpu", addressable_memories=lambda: memories)
    require_host_memory(CONFIG, device)
    told = r"--optimizer.offload-moments True offloads to the host, but TPU v3 \(tpu\) reaches no pinned_host"
    with pytest.raises(UserMistake, match=told):
        require_host_memory(OFFLOADED, device)
    model = dataclasses.replace(CONFIG.model, remat="offload_inputs")
    with pytest.raises(UserMistake, match=r"--model.remat offload_inputs offloads .*recompute more"):
        require_host_memory(dataclasses.replace(CONFIG, model=model), device)


def test_devices_whose_memories_jax_does_not_know_hold_no_moments_on_the_host():
    # As GPUs that aren't there: their shardings drop the kind of memory.
    device = SimpleNamespace(device_kind="NVIDIA H200", platform="gpu")
    mesh = SimpleNamespace(devices=np.array([device]))
    sharding = SimpleNamespace(mesh=mesh, memory_kind=None, with_memory_kind=lambda kind: sharding)
    with pytest.raises(UserMistake, match=r"can't lay arrays out in the host's memory for a NVIDIA H200 \(gpu\) that"):
        moments_on_host([np.zeros(3)], [sharding])
