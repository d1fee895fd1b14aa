"""A training loop that runs in no time, without data and without a device."""

import dataclasses
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tests.trainer.loop.steps import EndlessBatches, make_metrics
from trainer.config.file import load_config
from trainer.launch.peers import Peers
from trainer.loop.training_loop import TrainingLoop
from trainer.observers.observer import Start
from trainer.observers.record import RunRecord
from trainer.observers.times import TimeAccount
from trainer.step.flops import StepFlops
from trainer.step.train_step import TrainState
from trainer.workdir import claim_workdir


@pytest.fixture
def config(trainer_command):
    return load_config(trainer_command.config)


@pytest.fixture
def make_loop(config, tmp_path, watched_console):
    """Makes a loop whose steps take no time and no device. It is closed at the end of a test that didn't do so."""
    opened: list[TrainingLoop] = []

    def make(**changed) -> TrainingLoop:
        run = dataclasses.replace(config, **changed)
        [phase] = run.in_phases()
        setup = SimpleNamespace(
            run=run,
            config=run,
            phase=phase,
            phase_number=None,
            validation_digest="",
            batches=EndlessBatches(),
            put=lambda batch: batch,
            flops=SimpleNamespace(of_documents=lambda lengths, step: StepFlops(1, 2)),
            devices=[None],
            peak_flops_per_s=1e12,
        )
        workdir = claim_workdir(tmp_path / "run", config)
        account, stop = TimeAccount(time.perf_counter()), SimpleNamespace(requested=False, wait=lambda seconds: False)
        record = RunRecord(workdir.record, [], time.time(), account, watched_console)
        this = SimpleNamespace(
            console=watched_console, record=record, account=account, stop=stop, stalled=pytest.fail, peers=Peers()
        )
        loop = TrainingLoop([setup], workdir, this)
        metrics = make_metrics()
        loop.programs = SimpleNamespace(
            train_step=lambda state, _: (state, metrics), eval_step=None, is_compiling=False
        )
        zero = jnp.zeros(())
        loop.state = TrainState(step=zero, params={"w": jnp.zeros(3)}, opt_state={"m": zero}, skipping={"mean": zero})
        loop.observers.observe(Start(0, config.num_steps, [], []))
        opened.append(loop)

        def close() -> None:
            opened.remove(loop)
            TrainingLoop.close(loop)

        loop.close = close
        return loop

    yield make
    for loop in [*opened]:
        loop.close()
