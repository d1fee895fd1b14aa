"""One workload, compiled and timed in this process.

    python -m experiments.benchmarks.train_throughput.measure REQUEST

where REQUEST is {"workload": "124m_32k", "seed": null, "fields": {}}, or the like, prints one line of JSON, the result.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.train_throughput.workloads import WORKLOADS, Workload
from kernels.collectives import Collectives
from kernels.context import Exchange
from trainer.compile.stages import compile_in_stages
from trainer.config import ContextConfig, LossImplementation, MeshConfig, TensorConfig, TrainConfig
from trainer.data.sequence_sharding import SequenceSharder
from trainer.errors import TrainingFailed, UserMistake
from trainer.hardware import installed_versions
from trainer.observers.record import measured_memory
from trainer.step.flops import FlopCounter, peak_flops_per_s
from trainer.step.functions import make_step_functions
from trainer.step.plan import make_plan
from trainer.step.sharding import batch_sharding, make_mesh
from trainer.step.train_step import StepMetrics, TrainState


def measure(name: str, workload: Workload, config: TrainConfig, *, seed: int | None = None) -> dict[str, Any]:
    """Trains for some steps and returns the result, of JSON's types.

    Args:
      name: for the result.
      workload: its batches and numbers of steps.
      config: `workload.config()`, or that with something replaced.
      seed: of the tokens and documents; None: fresh ones.

    Raises:
      UserMistake: an attention backend, `tensor.collectives` or `loss.implementation` that can't serve.
      TrainingFailed: the loss or the gradient isn't finite.
    """
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    plan = make_plan(config, mesh)
    functions = make_step_functions(config, mesh, plan)
    state = functions.init_state()
    rng = np.random.default_rng(seed)
    host_batches = [make_batch(workload, config, rng) for _ in range(workload.num_batches)]
    sharder = SequenceSharder.of(config, plan.sequence_sharding)
    batches = itertools.cycle(
        [jax.device_put(shard_batch(batch, sharder), batch_sharding(mesh)) for batch in host_batches]
    )
    train_step, report = compile_in_stages(
        functions.train_step, functions.abstract_state, functions.abstract_batch, name="train_step"
    )

    def run(state: TrainState, num_steps: int) -> tuple[TrainState, StepMetrics, float]:
        """Steps from idle device to idle device, and the seconds of one."""
        begun = time.perf_counter()
        for _ in range(num_steps):
            state, metrics = train_step(state, next(batches))
        jax.block_until_ready(state)
        return state, metrics, (time.perf_counter() - begun) / num_steps

    # The first step also loads the program and allocates memory. For steps of minutes that doesn't matter.
    is_long = workload.num_windows * workload.steps_per_window == 1
    if not is_long:
        state, _, _ = run(state, 1)
    windows = []
    for _ in range(workload.num_windows):
        state, metrics, seconds = run(state, workload.steps_per_window)
        windows.append(seconds)
    if not metrics.finite:
        raise TrainingFailed(f"{name}: loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}")
    memory = measured_memory(device)
    step_s = statistics.median(windows)
    return {
        "workload": name,
        "mesh": dict(mesh.shape),
        "seed": seed,
        "tokens_per_s": config.batch_size * config.sequence_length / step_s,
        "step_s": step_s,
        "fastest_step_s": min(windows),
        "slowest_step_s": max(windows),
        **_mfu(config, host_batches, step_s, device, mesh.size),
        "device_peak_bytes": memory["device_peak_bytes"],
        "num_parameters": functions.num_parameters,
        "num_documents": statistics.mean(int(batch["segment_ids"].max()) for batch in host_batches),
        "loss": float(metrics.loss),
        "attention": [layers.backend for layers in plan.attention],
        "loss_implementation": plan.loss.implementation,
        "sequence_sharding": plan.sequence_sharding,
        "tensor": plan.to_json()["tensor"],
        "exchange": [layers.exchange.name for layers in plan.attention if layers.exchange is not None],
        "config": {
            "sequence_length": config.sequence_length,
            "implementation": config.model.implementation,
            "remat": config.model.remat,
            "scan_layers": config.model.scan_layers,
            "loss_chunk_size": config.loss.chunk_size,
        },
        "compile": report.to_json(),
        "device": device.device_kind,
        "versions": installed_versions(("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin")),
        "date": datetime.date.today().isoformat(),
    }


def _mfu(
    config: TrainConfig, batches: list[dict[str, np.ndarray]], step_s: float, device: jax.Device, num_devices: int
) -> dict[str, float | None]:
    """The batches' FLOPs over those that the devices can do in a step's time; None for an unknown device."""
    counter = FlopCounter(config.model, config.sequence_length, keep_documents_apart=config.data.keep_documents_apart)
    flops = [counter(batch["segment_ids"]) for batch in batches]
    peak = peak_flops_per_s(device, config.model.compute_dtype)
    capacity = None if peak is None else step_s * peak * num_devices
    return {
        "mfu_causal": capacity and statistics.mean(step.causal for step in flops) / capacity,
        "mfu_noncausal": capacity and statistics.mean(step.noncausal for step in flops) / capacity,
    }


def make_batch(workload: Workload, config: TrainConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch of the workload's sequences."""
    rows = [workload.batch(config.model.vocab_size, rng) for _ in range(config.batch_size)]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def shard_batch(batch: dict[str, np.ndarray], sharder: SequenceSharder) -> dict[str, np.ndarray]:
    """The batch with each sequence sharded over `mesh.context`."""
    rows = [sharder(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def override(
    config: TrainConfig,
    *,
    mesh: dict[str, int] | None = None,
    implementation: str | None = None,
    exchange: Exchange | None = None,
    collectives: Collectives | None = None,
    loss_implementation: LossImplementation | None = None,
) -> TrainConfig:
    """The config on a mesh, with these implementations. Each group of devices that splits the batch gets a sequence."""
    sizes = MeshConfig(**(mesh or {}))
    return dataclasses.replace(
        config,
        batch_size=sizes.data * sizes.fsdp,
        mesh=sizes,
        context=ContextConfig(exchange=exchange),
        tensor=TensorConfig(collectives),
        model=dataclasses.replace(config.model, implementation=implementation),
        loss=dataclasses.replace(config.loss, implementation=loss_implementation),
    )


def main(request: str) -> int:
    """Measures what a JSON object asks for, prints the result and returns the exit status."""
    asked = json.loads(request)
    workload = WORKLOADS[asked["workload"]]
    try:
        config = override(workload.config(), **asked["fields"])
        print(json.dumps(measure(asked["workload"], workload, config, seed=asked["seed"])))
    except (UserMistake, TrainingFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
