"""A window whose width grows over the steps, against runs whose mask has the width of each step."""

import dataclasses
import shutil
import time

import numpy as np
import pytest

from kernels import CausalMask, LocalMask, ScheduledWindow
from tests.compilations import count_compilations
from tests.kernels.peers_on_cpus import pass_for_gpus
from tests.trainer.step.sharded_steps import FLOAT64, LENGTH, MODEL, in_order_of_ranks, make_batch, put
from trainer.config import CheckpointConfig, ContextConfig, EvaluationConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.config.file import load_config
from trainer.step.functions import make_step_functions
from trainer.step.plan import make_plan
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


CONTEXT = {
    "all_gather": "balanced",
    "peer": "balanced",
    "halo": "zigzag",
    "ring": "contiguous",
    "all_to_all": "zigzag",
}
"""Each exchange, and the sharding of the sequences that it meets. The widest window reaches past the neighbours."""


def make_functions(*masks):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, masks=masks))
    return make_step_functions(config, make_mesh(config.mesh))


def state_before(functions, step):
    state = functions.init_state()
    return state._replace(step=state.step + (step - 1))


def run_step(functions, batch, step):
    """The metrics of a training step, and the validation loss of the parameters that it leaves."""
    batch = put(batch, functions.mesh)
    state, metrics = functions.train_step(state_before(functions, step), batch)
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


@pytest.mark.usefixtures("eight_devices", "float64")
def test_over_context_each_exchange_has_the_steps_of_one_device_in_one_program(rng, monkeypatch):
    pass_for_gpus(monkeypatch, None)
    batch = make_batch(rng, 48)
    model = dataclasses.replace(MODEL, **FLOAT64, masks=(WINDOW,), num_layers=1)

    def run_steps(**changes):
        config = dataclasses.replace(CONFIG, model=model, sequence_length=48, gradient_accumulation=1, **changes)
        mesh = make_mesh(config.mesh)
        plan = make_plan(config, mesh)
        functions = make_step_functions(config, mesh, plan)
        ordered = in_order_of_ranks(batch, config, plan.sequence_sharding)
        placed = put(ordered, mesh)
        with count_compilations() as counts:
            results = [functions.train_step(state_before(functions, step), placed)[1] for step in WIDTHS]
        assert counts["train_step"] == 1
        assert [int(metrics.window) for metrics in results] == list(WIDTHS.values())
        return np.array([(metrics.loss, metrics.grad_norm) for metrics in results])

    expected = run_steps(mesh=MeshConfig())
    assert np.abs(np.diff(expected, axis=0) / expected[1:]).min() > 1e-9
    for exchange, sequence_sharding in CONTEXT.items():
        found = run_steps(mesh=MeshConfig(context=4), context=ContextConfig(exchange, sequence_sharding))
        np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=exchange)


@pytest.fixture
def config(trainer_command, eight_devices):
    base = load_config(trainer_command.config)
    return dataclasses.replace(
        base,
        # In a composition, as its text in config.json is read back.
        model=dataclasses.replace(base.model, num_layers=1, masks=(CausalMask() & WINDOW,)),
        num_steps=6,
        sequence_length=64,
        mesh=MeshConfig(context=2),
        context=ContextConfig("halo", "zigzag"),
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
