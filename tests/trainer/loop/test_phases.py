"""A run in phases: the state is carried to the bit, wherever the run was killed, as from run to run by hand."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kernels import CausalMask, LocalMask
from layers import RopeScaling
from trainer.compile.out_of_memory import OutOfMemory
from trainer.compile.programs import AheadOfTime
from trainer.config import CheckpointConfig, EvaluationConfig, MeshConfig, OptimizerConfig, Phase, TrainConfig
from trainer.config.file import config_from_json, config_to_json, load_config
from trainer.config.resume_changes import refuse_other_phases
from trainer.errors import UserMistake
from trainer.loop.training_loop import TrainingLoop
from trainer.observers.observer import VALIDATION_LOSS
from trainer.saved_run import open_saved_run
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.train import train
from trainer.workdir import claim_workdir

WINDOW = CausalMask() & LocalMask(15, 0)
OWN_SCHEDULE = OptimizerConfig(learning_rate=3e-4, num_warmup_steps=1, schedule="wsd", decay_fraction=0.5)


@pytest.fixture(scope="module")
def base(trainer_command) -> TrainConfig:
    config = load_config(trainer_command.config)
    changes = {"num_layers": 3, "masks": (WINDOW, CausalMask()), "remat": "none", "compute_dtype": "float32"}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **changes),
        num_steps=7,
        sequence_length=32,
        batch_size=4,
        gradient_accumulation=1,
        optimizer=OptimizerConfig(learning_rate=1e-3, num_warmup_steps=2),
        evaluation=EvaluationConfig(every_num_steps=3, num_sequences=2),
        checkpoint=CheckpointConfig(every_num_steps=2, num_kept=100),
    )


@pytest.fixture(scope="module")
def phased(base) -> TrainConfig:
    # The last phase has one stack of layers, where the others have two.
    longer = Phase(num_steps=2, sequence_length=64, batch_size=2, rope_base=5e4, rope_layers="global")
    last = Phase(sequence_length=128, masks=(CausalMask(),) * 2, optimizer=OWN_SCHEDULE, moments="fresh")
    return dataclasses.replace(base, phases=(Phase(num_steps=2), longer, last))


def run(config: TrainConfig, path: Path) -> Path:
    assert train(config, claim_workdir(path, config), command=["test"], started=time.perf_counter()) == 0
    return path


@pytest.fixture(scope="module")
def finished(phased, tmp_path_factory) -> Path:
    return run(phased, tmp_path_factory.mktemp("phases") / "run")


def read_state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as orbax:
        state = orbax.restore(workdir / "checkpoints" / str(step) / "state")
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.flatten_with_path(state)[0]}


def read_metrics(workdir: Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    volatile = ("time", "step_s", "data_wait_s", "tokens_per_s", "mfu_causal", "mfu_noncausal")
    return [{name: value for name, value in json.loads(line).items() if name not in volatile} for line in lines]


def assert_same_state(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


# Within the first phase, at its border, within the second, at its border.
@pytest.mark.parametrize("step", [pytest.param(step, marks=pytest.mark.sample(2)) for step in (2, 4, 6)])
def test_a_run_resumes_in_any_phase_to_the_bit(phased, finished, tmp_path, step):
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    for checkpoint in (path / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    run(phased, path)
    assert_same_state(read_state(path, 7), read_state(finished, 7))
    assert read_metrics(path) == read_metrics(finished)
    states = [json.loads((each / "checkpoints" / "7" / "run.json").read_text())["data"] for each in (path, finished)]
    assert states[0] == states[1]


def stop(loop: TrainingLoop) -> None:
    """Sends a stop signal, and returns once the run knows."""
    os.kill(os.getpid(), signal.SIGTERM)
    while not loop.stop.requested:
        time.sleep(0.01)


def test_a_stop_while_the_phase_changes_loses_nothing(phased, finished, tmp_path, monkeypatch):
    """The last phase has other stacks of layers than the one before, whose checkpoint the border's is."""
    enter = TrainingLoop._enter

    def stop_amid(loop, index):
        if index == 2:  # the state is the next phase's already, and its programs are still to come
            stop(loop)
        enter(loop, index)

    # Step 4 is saved for its phase's end alone.
    config = dataclasses.replace(phased, checkpoint=CheckpointConfig(every_num_steps=100))
    workdir = claim_workdir(tmp_path / "run", config)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_enter", stop_amid)
        assert train(config, workdir, command=["test"], started=time.perf_counter()) == 75
    assert sorted(path.name for path in workdir.checkpoints.iterdir()) == ["2", "4"]
    assert train(config, workdir, command=["again"], started=time.perf_counter()) == 0
    assert_same_state(read_state(workdir.path, 7), read_state(finished, 7))
    assert read_metrics(workdir.path) == read_metrics(finished)


def test_a_stop_in_a_phases_last_step_leaves_its_evaluation_to_the_resumption(phased, finished, tmp_path, monkeypatch):
    evaluate = TrainingLoop.evaluate_if_due

    def stop_before(loop):
        if loop.progress.step == 4:
            stop(loop)
        evaluate(loop)

    workdir = claim_workdir(tmp_path / "run", phased)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "evaluate_if_due", stop_before)
        assert train(phased, workdir, command=["test"], started=time.perf_counter()) == 75
    assert [row["step"] for row in read_metrics(workdir.path) if VALIDATION_LOSS in row] == [2, 3]
    assert train(phased, workdir, command=["again"], started=time.perf_counter()) == 0
    assert_same_state(read_state(workdir.path, 7), read_state(finished, 7))
    assert read_metrics(workdir.path) == read_metrics(finished)


def said(capsys) -> str:
    """The line that tells what is left of an epoch of another sequence length."""
    [line] = [line for line in capsys.readouterr().out.splitlines() if "those that are left" in line]
    assert "sequences of 64 tokens (sequence_length=32 before): epoch 1 goes on" in line
    return line


def test_two_phases_are_two_runs_joined_by_init_from(base, tmp_path, capsys):
    first = dataclasses.replace(base, num_steps=3)
    changes = {"sequence_length": 64, "batch_size": 2, "optimizer": OWN_SCHEDULE}
    phases = (Phase(num_steps=3), Phase(**changes, masks=(CausalMask(),), rope_base=5e4))
    whole = run(dataclasses.replace(base, optimizer=first.optimizer, phases=phases), tmp_path / "whole")
    told = said(capsys)
    begun = run(first, tmp_path / "first")
    model = dataclasses.replace(base.model, masks=(CausalMask(),), rope_base=5e4)
    second = dataclasses.replace(
        base, model=model, num_steps=4, init_from=str(begun), init_optimizer="carry", **changes
    )
    joined = run(second, tmp_path / "second")
    assert said(capsys) == told, "both go on with the same documents"
    ours, theirs = read_state(whole, 7), read_state(joined, 4)
    for name in ("['step']", *(name for name in ours if "ScheduleState" in name or name.endswith("[3]['count']"))):
        assert int(ours.pop(name)) == 7, name  # the whole run's steps
        assert int(theirs.pop(name)) == 4, name
    assert_same_state(ours, theirs)
    losses = [{row["step"]: row["loss"] for row in read_metrics(each) if "loss" in row} for each in (whole, joined)]
    assert [losses[0][step] for step in (4, 5, 6, 7)] == [losses[1][step] for step in (1, 2, 3, 4)]


def test_each_phase_follows_its_schedule_and_is_recorded(finished):
    rows = {row["step"]: row for row in read_metrics(finished) if "loss" in row}
    cosine = [0.5e-3 * step for step in (1, 2)] + [
        1e-3 * (0.9 * np.sin(np.pi / 2 * left / 2) ** 2 + 0.1) for left in (1, 0)
    ]
    own = [3e-4, 3e-4 * 0.55, 3e-4 * 0.1]  # one step of warm-up, two of decay
    np.testing.assert_allclose([rows[step]["learning_rate"] for step in range(1, 8)], cosine + own, rtol=1e-6)
    assert [row["phase"] for row in read_metrics(finished) if "loss" in row] == [1, 1, 2, 2, 3, 3, 3]
    of_evaluations = {row["step"]: row["phase"] for row in read_metrics(finished) if "loss" not in row}
    assert of_evaluations == {2: 1, 3: 2, 4: 2, 6: 3, 7: 3}
    record = json.loads((finished / "record.json").read_text())
    assert [(each["first_step"], each["last_step"], each["sequence_length"]) for each in record["phases"]] == [
        (1, 2, 32),
        (3, 4, 64),
        (5, 7, 128),
    ]
    # Programs of later phases were compiled before their first step, and none was compiled again.
    assert [each["first_step"] for each in record["compile"]["phases"]] == [3, 5]
    assert record["compile"]["recompiles"] == []


def test_the_model_of_a_checkpoint_is_that_of_its_phase(finished):
    bases = {}
    for step in (2, 4, 6):
        config = open_saved_run(finished, setting="--workdir", step=step).config
        bases[step] = [config.model.layer(layer).rope_base for layer in range(3)]
    assert bases == {2: [1e4] * 3, 4: [1e4, 5e4, 1e4], 6: [1e4, 5e4, 1e4]}


def test_fresh_moments_begin_at_zero(base, finished):
    """The moments of the last phase hold the gradients of its own steps alone: Adam has counted them."""
    counts = {
        step: [int(leaf) for name, leaf in read_state(finished, step).items() if "[1]" in name and "count" in name]
        for step in (4, 6)
    }
    assert counts == {4: [4], 6: [2]}


@pytest.mark.sample(1)
def test_a_phase_on_another_mesh(base, tmp_path, eight_devices):
    """Exchanges sum in another order, so the losses agree to rounding."""
    losses = []
    for name, mesh in (("one", None), ("two", MeshConfig(context=2))):
        phases = (Phase(num_steps=2), Phase(num_steps=2, sequence_length=64, mesh=mesh))
        config = dataclasses.replace(base, mesh=MeshConfig(fsdp=2), num_steps=4, phases=phases)
        losses.append([row["loss"] for row in read_metrics(run(config, tmp_path / name)) if "loss" in row])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)


def test_phases_are_read_back(phased):
    assert config_from_json(json.loads(json.dumps(config_to_json(phased)))) == phased


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        ((Phase(), Phase()), r"phases\[0\] has no length; set its num_steps or num_tokens"),
        ((Phase(num_steps=3), Phase(num_steps=3)), r"num_steps=7 is not the length.*end after \[3, 6\] steps"),
        ((Phase(num_steps=7), Phase()), r"num_steps=7 is not the length.*end after \[7, 7\] steps"),
        ((Phase(num_steps=3), Phase(rope_base=500.0)), r"phases\[1\]: rope_base=500.0 is less than the 10000.0 before"),
        ((Phase(num_steps=3), Phase(batch_size=3, gradient_accumulation=2)), r"phases\[1\]: batch_size=3 is not a mul"),
        ((Phase(num_steps=3), Phase(mesh=MeshConfig(data=2))), r"phases\[1\]: mesh=.* another number of devices"),
        ((Phase(num_steps=3), Phase(optimizer=OptimizerConfig(num_warmup_steps=9))), r"phases\[1\]: .*warmup_steps=9"),
        ((Phase(num_steps=3), Phase(optimizer=OptimizerConfig(kind="muon", num_warmup_steps=0))), "moments of 'adamw'"),
        (
            (
                Phase(num_steps=3, rope_scaling=RopeScaling("linear", 4.0)),
                Phase(rope_scaling=RopeScaling("linear", 2.0)),
            ),
            r"phases\[1\]: rope_scaling.factor=2.0 is less than the 4.0 before",
        ),
        ((Phase(num_steps=3), Phase(masks=(CausalMask(),) * 4)), r"phases\[1\]: model.masks has 4 entries"),
    ],
)
def test_phases_that_cannot_be_are_refused(base, phases, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(base, phases=phases)


def test_a_phase_has_one_length():
    with pytest.raises(ValueError, match="num_steps=2 and num_tokens=3; leave one out"):
        Phase(num_steps=2, num_tokens=3)


def test_a_length_in_tokens_is_rounded_up(base):
    lengths = (Phase(num_tokens=4 * 32 * 2 + 1), Phase(sequence_length=64, batch_size=1))
    ends = [phase.last_step for phase in dataclasses.replace(base, phases=lengths).in_phases()]
    assert ends == [3, 7]


def test_phases_that_are_made_stay(phased):
    def with_phases(*phases: Phase, **changes) -> TrainConfig:
        return dataclasses.replace(phased, phases=phases, **changes)

    first, second, last = phased.phases
    longer = dataclasses.replace(second, num_steps=4)
    refuse_other_phases(phased, with_phases(first, longer, last, num_steps=9), 3)  # the phase under way may last longer
    refuse_other_phases(phased, with_phases(first, second, last, num_steps=20), 6)
    with pytest.raises(UserMistake, match=r"model\.rope_base: 10000\.0 in phases"):
        refuse_other_phases(phased, with_phases(first, dataclasses.replace(second, rope_layers="all"), last), 4)
    with pytest.raises(UserMistake, match=r"the config has 1 phases, and the checkpoint of step 4 is of phases\[1\]"):
        refuse_other_phases(phased, with_phases(Phase()), 4)
    with pytest.raises(UserMistake, match=r"phases\[0\] takes steps 1 to 1, and those of the checkpoint, 1 to 2,"):
        refuse_other_phases(phased, with_phases(dataclasses.replace(first, num_steps=1), second, last), 4)
    with pytest.raises(UserMistake, match=r"phases\[1\] ends after step 3, and the checkpoint of step 4"):
        refuse_other_phases(phased, with_phases(first, dataclasses.replace(second, num_steps=1), last), 4)


def test_another_phase_is_refused_before_the_state_is_read(phased, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", lambda *_: pytest.fail("the state is read"))
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    last = dataclasses.replace(phased.phases[-1], masks=(WINDOW, CausalMask()))
    other = dataclasses.replace(phased, phases=(*phased.phases[:-1], last))
    with pytest.raises(UserMistake, match=r"model\.masks: .* in phases\[2\] of the checkpoint"):
        train(other, claim_workdir(path, other), command=["test"], started=time.perf_counter())


def test_a_step_of_a_phase_is_the_step_of_a_run_without(phased):
    """The same program, but for the schedule: a phase costs nothing."""
    phase = phased.in_phases()[1]
    own = {"model": phase.config.model, "sequence_length": 64, "batch_size": 2, "num_steps": phase.config.num_steps}
    texts = []
    for config in (phase.config, dataclasses.replace(phased, phases=(), **own)):
        functions = make_step_functions(config, make_mesh(config.mesh))
        texts.append(functions.train_step.lower(functions.abstract_state, functions.abstract_batch).as_text())
    assert texts[0] == texts[1]


def test_a_later_phase_that_does_not_compile_ends_the_run_where_it_begins(phased, monkeypatch):
    functions = {
        index: make_step_functions(phase.config, make_mesh(phase.config.mesh))
        for index, phase in enumerate(phased.in_phases())
        if index
    }
    compiled, asked = [], threading.Event()

    def compile_one(functions, *, lowered, **_):
        compiled.append(functions)
        if len(compiled) == 1:
            return "programs"
        asked.wait()
        raise OutOfMemory("train_step", "no room", on_host=False)

    monkeypatch.setattr("trainer.compile.programs.compile_steps", compile_one)
    ahead = AheadOfTime(functions, lambda *_: None)
    assert ahead.take(1) == "programs"
    asked.set()
    with pytest.raises(OutOfMemory, match="no room"):
        ahead.take(2)
    ahead.close()
    assert compiled == [functions[1], functions[2]]


def test_a_run_that_ends_compiles_no_further_phase(phased, monkeypatch):
    functions = {
        index: make_step_functions(phase.config, make_mesh(phase.config.mesh))
        for index, phase in enumerate(phased.in_phases())
        if index
    }
    compiled, goes_on = [], threading.Event()

    def compile_one(functions, **_):
        compiled.append(functions)
        goes_on.wait()

    monkeypatch.setattr("trainer.compile.programs.compile_steps", compile_one)
    ahead = AheadOfTime(functions, lambda *_: None)
    threading.Timer(0.2, goes_on.set).start()
    ahead.close()
    assert goes_on.is_set()
    assert compiled == [functions[1]]
