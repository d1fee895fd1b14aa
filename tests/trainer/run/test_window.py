"""A log window counts the whole batch, of which this process may have read a share."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from layers import GPTConfig
from trainer.config import OptimizerConfig
from trainer.data import BatchShare
from trainer.observers.times import StepTimes, TimeAccount
from trainer.run.window import RunningWindow
from trainer.step.flops import FlopCounter
from trainer.step.functions import StepMetrics

T = 64


@pytest.mark.parametrize("rows", [(0, 1, 2), (1,)])
def test_flops_and_tokens_are_those_of_all_processes(rows, rng):
    model = GPTConfig(vocab_size=64, num_layers=2, width=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=32)
    flops = FlopCounter(model, T)
    setup = SimpleNamespace(
        config=SimpleNamespace(num_steps=9, optimizer=OptimizerConfig()),
        flops=flops,
        tokens_per_step=3 * T,
        devices=[None] * 4,
        peak=SimpleNamespace(flops_per_s=1e9),
    )
    ids = np.sort(rng.integers(1, 5, (2, 3, T)), axis=-1)
    metrics = StepMetrics(*map(jnp.asarray, (1.0, 0.0, 1.0, 1.0, 512, True, 0, 0)))
    of_some_runs = {
        "load_balance_loss": jnp.asarray(2.5),
        "router_z_loss": jnp.asarray(0.25),
        "num_losses_recomputed": jnp.asarray(3),
    }
    window = RunningWindow(setup, TimeAccount(time.perf_counter()), first_step=1)
    for number, of_batch in enumerate(ids):
        lengths = tuple(np.unique(row, return_counts=True)[1] for row in of_batch)
        share = BatchShare({"segment_ids": of_batch[list(rows)]}, rows, lengths)
        window.add(share, metrics._replace(**of_some_runs) if number else metrics)
    window.wait(metrics)
    done = window.result(StepTimes(), SimpleNamespace(recompile_seconds=lambda name, step: None))
    seconds = 2 * done.step_s
    expected = [sum(counts) / (seconds * 4e9) for counts in zip(*map(flops, ids), strict=True)]
    assert [done.mfu_causal, done.entries[-1]["mfu_noncausal"]] == pytest.approx(expected)
    assert [of_some_runs.keys() & entry.keys() for entry in done.entries] == [set(), of_some_runs.keys()]
    assert [done.entries[-1][name] for name in of_some_runs] == [2.5, 0.25, 3]
    assert done.tokens_per_s == pytest.approx(2 * 3 * T / seconds)
