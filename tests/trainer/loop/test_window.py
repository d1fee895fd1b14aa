"""A log window counts the whole batch, of which this process may have read a share."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from layers import GPTConfig
from tests.trainer.loop.steps import EndlessBatches
from trainer.config import OptimizerConfig
from trainer.data import BatchShare
from trainer.loop.window import RunningWindow
from trainer.observers.times import StepTimes, TimeAccount
from trainer.step.flops import FlopCounter
from trainer.step.train_step import StepMetrics

T = 64


@pytest.mark.parametrize("peak", [1e9, None])
@pytest.mark.parametrize("rows", [(0, 1, 2), (1,)])
def test_flops_and_tokens_are_those_of_all_processes_without_padding(rows, peak, rng):
    model = GPTConfig(vocab_size=64, num_layers=2, width=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=32)
    flops = FlopCounter(model, T)
    config = SimpleNamespace(num_steps=9, optimizer=OptimizerConfig())
    setup = SimpleNamespace(
        run=config, config=config, flops=flops, devices=[None] * 4, peak_flops_per_s=peak, phase_number=2
    )
    setup.batches = EndlessBatches()
    ids = np.sort(rng.integers(0, 5, (2, 3, T)), axis=-1)  # 0: padding
    num_tokens = [int((of_batch > 0).sum()) for of_batch in ids]
    metrics = StepMetrics(*map(jnp.asarray, (1.0, 0.0, 1.0, 1.0, 0, 0, True, 0, 0)))
    values = {"load_balance_loss": 2.5, "router_z_loss": 0.25, "num_losses_recomputed": 3}
    of_some_runs = {name: jnp.asarray(value) for name, value in values.items()}
    window = RunningWindow(setup, TimeAccount(time.perf_counter()), first_step=1)
    for number, of_batch in enumerate(ids):
        lengths = tuple(np.unique(row[row > 0], return_counts=True)[1] for row in of_batch)
        share = BatchShare({"segment_ids": of_batch[list(rows)]}, rows, lengths)
        told = metrics._replace(num_tokens=jnp.asarray(num_tokens[number]))
        window.add(share, told._replace(**of_some_runs) if number else told)
    window.wait(metrics)
    times = StepTimes()
    done = window.result(times, SimpleNamespace(recompile_seconds=lambda name, step: None))
    seconds = 2 * done.step_s
    expected = [peak and sum(counts) / (seconds * 4 * peak) for counts in zip(*map(flops, ids), strict=True)]
    assert [done.mfu_causal, done.entries[-1]["mfu_noncausal"]] == pytest.approx(expected)
    assert [times.to_json()[name] for name in ("mfu_causal", "mfu_noncausal")] == pytest.approx(expected)
    assert [of_some_runs.keys() & entry.keys() for entry in done.entries] == [set(), of_some_runs.keys()]
    assert values.items() <= done.entries[-1].items()
    assert [entry["phase"] for entry in done.entries] == [2, 2]
    assert sum(num_tokens) < 2 * 3 * T
    assert done.tokens_per_s == done.entries[-1]["tokens_per_s"] == pytest.approx(sum(num_tokens) / seconds)
