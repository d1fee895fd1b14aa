"""What is refused of how ranks of `mesh.context` get at their keys."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels import LocalMask, ScheduledWindow
from layers import GPTConfig
from trainer.config import ContextConfig, MeshConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.step.attention_plan import plan_context_parallelism

RING = TrainConfig(
    name="ring",
    num_steps=1000,
    sequence_length=4096,
    batch_size=2,
    gradient_accumulation=2,
    model=GPTConfig(num_layers=2, num_heads=4, num_kv_heads=4, width=64, head_dim=16),
    mesh=MeshConfig(context=2),
    context=ContextConfig(exchange="ring"),
)


@pytest.fixture
def mesh():
    device = jax.devices("cpu")[0]
    return Mesh(np.array([device, device]).reshape(1, 1, 1, 2), ("data", "fsdp", "tensor", "context"))


@pytest.mark.parametrize("version", [(0, 11, 2), (0, 12, 0)])
def test_a_ring_that_newer_runtimes_for_cpus_mix_up_is_refused(version, mesh, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    with pytest.raises(UserMistake, match=r"exchange='ring' beside model\.remat='full' and gradient_accumulation=2"):
        plan_context_parallelism(RING, mesh)
    once = dataclasses.replace(RING, gradient_accumulation=1)
    kept = dataclasses.replace(RING, model=dataclasses.replace(RING.model, remat="none"))
    gathered = dataclasses.replace(RING, context=ContextConfig(exchange="all_gather"))
    for config, exchange in ((once, "ring"), (kept, "ring"), (gathered, "all_gather")):
        assert {chosen.name for chosen in plan_context_parallelism(config, mesh).exchanges} == {exchange}
    plan_context_parallelism(RING, None)  # the devices may be others


def test_a_ring_is_served_where_the_runtime_is_right(mesh, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert {chosen.name for chosen in plan_context_parallelism(RING, mesh).exchanges} == {"ring"}


def test_a_scheduled_window_is_planned_for_its_widest(mesh):
    def plan(mask, exchange):
        model = dataclasses.replace(RING.model, masks=(mask,))
        return plan_context_parallelism(
            dataclasses.replace(RING, model=model, context=ContextConfig(exchange=exchange)), mesh
        )

    for exchange in ("halo", "all_gather", None):
        assert plan(ScheduledWindow(2, 600, 100), exchange) == plan(LocalMask(599, 0), exchange)
    with pytest.raises(UserMistake, match=r"would be all of the sequence, since ScheduledWindow.* 3,072 tokens far"):
        plan(ScheduledWindow(2, 3073, 100), "halo")
