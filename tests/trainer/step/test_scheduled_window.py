"""A window whose width grows over the steps, against runs whose mask has the width of each step."""

import dataclasses
import shutil
import time

import numpy as np
import pytest

from kernels import CausalMask, LocalMask, ScheduledWindow
from tests.compilations import count_compilations
from tests.trainer.step.sharded_steps import LENGTH, MODEL, make_batch, put
from trainer.config import CheckpointConfig, EvaluationConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.config.file import load_config
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.train import train
from trainer.workdir import claim_workdir

WINDOW = ScheduledWindow(start=2, stop=20, num_steps=5)
WIDTHS = {1: 2, 2: 6, 5: 20}  # 4.5 tokens more at each step
CONFIG = TrainConfig(
    "scheduled",
    MODEL,
    num_steps=20,
    sequence_length=LENGTH,
    batch_size=8,
    gradient_accumulation=2,
    optimizer=OptimizerConfig(num_warmup_steps=1),
    mesh=MeshConfig(data=2, fsdp=2),
)


def make_functions(*masks):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, masks=masks))
    return make_step_functions(config, make_mesh(config.mesh))


def run_step(functions, batch, step):
    """The metrics of a training step, and the validation loss of the parameters that it leaves."""
    batch, state = put(batch, functions.mesh), functions.init_state()
    state, metrics = functions.train_step(state._replace(step=state.step + (step - 1)), batch)
    return metrics, functions.eval_step(state.params, batch, state.step).nats


def test_a_step_has_the_loss_and_the_gradient_of_its_width(rng):
    batch, scheduled, losses = make_batch(rng), make_functions(WINDOW, CausalMask()), []
    for step, width in WIDTHS.items():
        metrics, validation_loss = run_step(scheduled, batch, step)
        static = make_functions(LocalMask(width - 1, 0), CausalMask())
        expected, expected_validation_loss = run_step(static, batch, step)
        assert (int(metrics.window), expected.window) == (width, None)
        np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
        np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=1e-5)
        np.testing.assert_allclose(validation_loss, expected_validation_loss, rtol=1e-6)
        losses.append(float(metrics.loss))
    # What the comparisons allow is less than what a width makes.
    assert np.abs(np.diff(losses)).min() > 1e-4


@pytest.fixture(scope="module")
def config(trainer_command):
    base = load_config(trainer_command.config)
    return dataclasses.replace(
        base,
        # In a composition, as its text in config.json is read back.
        model=dataclasses.replace(base.model, num_layers=1, masks=(CausalMask() & WINDOW,)),
        num_steps=6,
        sequence_length=64,
        log_every_num_steps=2,
        evaluation=EvaluationConfig(every_num_steps=2, num_sequences=2),
        checkpoint=CheckpointConfig(every_num_steps=2),
    )


def test_a_run_compiles_once_logs_each_width_and_resumes_to_the_bit(config, tmp_path, read_run, read_tensorboard):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with count_compilations() as counts:
        assert train(config, claim_workdir(whole, config), command=["first"], started=time.perf_counter()) == 0
    assert (counts["train_step"], counts["eval_step"]) == (1, 1)
    record, steps, evaluations = read_run(whole)
    assert record["compile"]["recompiles"] == []
    assert [row["window"] for row in steps] == [2, 6, 11, 16, 20, 20]
    assert list(read_tensorboard(whole / "tensorboard")["train/window"].values()) == [2, 6, 11, 16, 20, 20]

    shutil.copytree(whole, resumed)
    for step in ("4", "6"):
        shutil.rmtree(resumed / "checkpoints" / step)
    saved = load_config(resumed / "config.json")
    assert saved.model == config.model
    assert train(saved, claim_workdir(resumed, saved), command=["again"], started=time.perf_counter()) == 0
    record, again, evaluations_again = read_run(resumed)
    assert record["resumed_from"]["step"] == 2
    for name in ("loss", "grad_norm", "window"):
        assert [row[name] for row in again] == [row[name] for row in steps]
    losses, losses_again = (
        [row["validation_nats_per_token"] for row in each] for each in (evaluations, evaluations_again)
    )
    assert losses_again == losses
