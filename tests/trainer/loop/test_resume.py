"""A run that resumes with another config goes on as that says, from its place in the data, and keeps the change."""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import BlockwiseTuning, CausalMask
from trainer.checkpoints.folder import read_metadata
from trainer.checkpoints.training_state import Restored
from trainer.compile.programs import CompiledSteps
from trainer.config import DataConfig, EvaluationConfig, OptimizerConfig, TrainConfig
from trainer.config.file import config_to_json, load_config
from trainer.config.resume_changes import ConfigHistory
from trainer.data import TrainIterator, load_corpus, make_train_iterator
from trainer.errors import TrainingFailed, UserMistake
from trainer.loop.resume import go_on_from, refuse_other_checkpoint
from trainer.loop.window import RunningWindow
from trainer.observers.observer import VALIDATION_LOSS
from trainer.saved_run import open_saved_run
from trainer.train import train
from trainer.workdir import Workdir, claim_workdir


@pytest.fixture(scope="module")
def config(trainer_command) -> TrainConfig:
    config = load_config(trainer_command.config)
    changes = {"num_layers": 1, "masks": (CausalMask(),), "implementation": BlockwiseTuning(32, 16)}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **changes),
        num_steps=4,
        sequence_length=64,
        optimizer=OptimizerConfig(learning_rate=1e-3, num_warmup_steps=2),
        evaluation=EvaluationConfig(every_num_steps=2, num_sequences=2),
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory) -> Path:
    """The workdir of a run of four steps."""
    workdir = claim_workdir(tmp_path_factory.mktemp("finished") / "run", config)
    assert train(config, workdir, command=["first"], started=time.perf_counter()) == 0
    return workdir.path


@pytest.fixture
def resume(finished, tmp_path, capsys, read_run):
    """Resumes a copy of that run with another config; each time what it ended with, said and left."""
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    claimed: list[Workdir] = []

    def go_on(config: TrainConfig) -> SimpleNamespace:
        # This process claims it once; the lock would refuse the second time.
        claimed.append(claimed[0] if claimed else claim_workdir(path, config))
        status = train(config, claimed[0], command=["again"], started=time.perf_counter())
        left = dict(zip(("record", "steps", "evaluations"), read_run(path), strict=True))
        left["config"] = json.loads((path / "config.json").read_text())
        return SimpleNamespace(status=status, output=capsys.readouterr().out, path=path, **left)

    return go_on


@pytest.fixture
def place(finished, tmp_path):
    """Puts a run at the place of the last checkpoint and no further: (history, lines told, batches)."""
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    opened = []

    def go_on(config: TrainConfig) -> tuple[ConfigHistory, list[str], TrainIterator]:
        corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
        options = {"batch_size": config.batch_size, "seed": config.seed, "num_prefetch_batches": 1}
        batches = make_train_iterator(corpus, sequence_length=64, **options)
        opened.append(batches)
        checkpoint = path / "checkpoints" / "4"
        metadata = read_metadata(checkpoint)
        restored = Restored(checkpoint, 4, None, metadata.data, metadata.config_history, ())
        history, told = go_on_from(
            restored, SimpleNamespace(run=config, config=config, batches=batches), Workdir(path, lock=0)
        )
        return history, told, batches

    yield go_on
    for batches in opened:
        batches.close()


def cosine(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """The learning rate of a step, counted from 1."""
    peak, final = optimizer.learning_rate, optimizer.learning_rate * optimizer.final_learning_rate_fraction
    part = (step - optimizer.num_warmup_steps) / (num_steps - optimizer.num_warmup_steps)
    return final + (peak - final) * (1 + math.cos(math.pi * part)) / 2


def test_a_run_is_extended_with_another_rate_batch_and_evaluation_then_cut_short(
    config, finished, resume, read_run, monkeypatch
):
    _, before, evaluations_before = read_run(finished)
    extended = dataclasses.replace(
        config,
        num_steps=7,
        batch_size=6,
        gradient_accumulation=2,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=3e-3),
        evaluation=EvaluationConfig(every_num_steps=5, num_sequences=3),
    )
    longer = resume(extended)
    assert longer.status == 0
    assert (longer.record["status"], longer.record["step"]) == ("completed", 7)
    assert longer.config == config_to_json(extended)

    # What was is kept; what follows has the new schedule and the data's next sequences.
    assert longer.steps[:4] == before
    assert longer.evaluations[:2] == evaluations_before
    assert [row["step"] for row in longer.evaluations] == [2, 4, 5, 7]
    rates = [cosine(step, 7, extended.optimizer) for step in (5, 6, 7)]
    assert [row["learning_rate"] for row in longer.steps[4:]] == pytest.approx(rates, rel=1e-5)
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    stream = make_train_iterator(corpus, sequence_length=64, batch_size=2, seed=config.seed, num_prefetch_batches=1)
    targets = [int(next(stream).arrays["weights"].sum()) for _ in range(13)]
    stream.close()
    assert [row["num_targets"] for row in before] == targets[:4]
    assert [row["num_targets"] for row in longer.steps[4:]] == [sum(targets[i : i + 3]) for i in (4, 7, 10)]

    changed = {"num_steps": (4, 7), "batch_size": (2, 6), "gradient_accumulation": (1, 2)}
    changed |= {"optimizer.learning_rate": (1e-3, 3e-3), "evaluation.every_num_steps": (2, 5)}
    changed |= {"evaluation.num_sequences": (2, 3)}
    expected = [{"step": 4, "field": name, "before": old, "after": new} for name, (old, new) in changed.items()]

    def by_field(changes: list[dict]) -> list[dict]:
        return sorted(changes, key=lambda change: (change["step"], change["field"]))

    assert by_field(longer.record["config_changes"]) == by_field(expected)
    lines = longer.output.splitlines()
    at = lines.index(f"resumed at step 4/7 from {longer.path}/checkpoints")
    told = {f"{name}: {old!r} up to step 4, {new!r} from now on" for name, (old, new) in changed.items()}
    assert set(lines[at + 1 : at + 7]) == told
    old, new = cosine(4, 4, config.optimizer), rates[0]
    assert lines[at + 7] == (
        "the learning rate follows the new schedule of 7 steps as if it had been so from the start: "
        f"{new:.3g} in step 5, {old:.3g} by the one before"
    )
    assert sum(line.startswith("validation losses are measured otherwise from now on") for line in lines) == 1

    # The example of `make help`: a run that is past the steps asked for has none left to make.
    monkeypatch.setattr(
        "trainer.loop.training_loop.compile_steps", lambda *_, **__: CompiledSteps(None, None, None, ())
    )
    shorter = resume(dataclasses.replace(extended, num_steps=5))
    assert shorter.status == 0
    assert (shorter.record["status"], shorter.record["step"]) == ("completed", 7)
    assert "resumed at step 7/5" in shorter.output
    assert "no step is left to make" in shorter.output
    assert (shorter.steps, shorter.evaluations) == (longer.steps, longer.evaluations)
    assert shorter.config["num_steps"] == 5
    cut = {"step": 7, "field": "num_steps", "before": 7, "after": 5}
    assert by_field(shorter.record["config_changes"]) == by_field([*expected, cut])
    metadata = read_metadata(shorter.path / "checkpoints" / "7")
    assert by_field(metadata.config_history["changes"]) == by_field(expected)


def test_a_finished_run_is_evaluated_anew_with_other_validation_files_and_again_with_those_before(
    config, finished, resume, read_run, tmp_path
):
    """An earlier attempt's loss is a loss of now only if it was measured on the same sequences."""
    (tmp_path / "other.txt").write_text("other words " * 50)
    data = dataclasses.replace(config.data, validation_files=(str(tmp_path / "other.txt"),), allow_changed=True)
    _, _, first = read_run(finished)
    other = resume(dataclasses.replace(config, data=data))
    back = resume(dataclasses.replace(config, data=dataclasses.replace(config.data, allow_changed=True)))
    for run, expected in ((other, first), (back, other.evaluations)):
        assert run.evaluations[:-1] == expected, "what was logged is kept"
        assert "validation losses are measured otherwise from now on" in run.output
    of_step_4 = [first[-1], other.evaluations[-1], back.evaluations[-1]]
    assert [entry["step"] for entry in of_step_4] == [4, 4, 4]
    losses = [entry[VALIDATION_LOSS] for entry in of_step_4]
    assert losses[0] == losses[2] != losses[1]
    for run, loss in zip((other, back), losses[1:], strict=True):
        assert run.record["evaluation"][VALIDATION_LOSS] == loss
        assert f"validation: {loss:.4f} nats/token" in run.output


def test_a_finished_run_is_read_with_the_config_of_its_steps(config, resume):
    """A model that was trained on 64 tokens isn't told to have seen more."""
    resumed = resume(dataclasses.replace(config, sequence_length=128))
    assert resumed.config["sequence_length"] == 128
    assert open_saved_run(resumed.path, setting="--workdir").config == config


def test_a_change_that_no_step_followed_is_forgotten(config, place):
    """The checkpoint tells what its steps were made with, so what an attempt that saved none was told is not kept."""
    history, told, _ = place(dataclasses.replace(config, num_steps=3, log_every_num_steps=5))
    assert [change.field for change in history.changes] == ["num_steps", "log_every_num_steps"]
    assert len(told) == 2, "no step is left, so no learning rate is told"
    history, told, _ = place(config)
    assert (history.changes, told) == ((), [])


def test_files_that_were_added_are_refused_or_begun_with_an_epoch(config, place, trainer_command, tmp_path):
    documents = tmp_path / "documents"
    shutil.copytree(trainer_command.config.parent / "documents", documents)
    moved = dataclasses.replace(config, data=dataclasses.replace(config.data, files=(str(documents / "*.txt"),)))
    _, told, same = place(moved)
    [change] = told
    assert change.startswith("data.files: "), "the same documents in another place"
    assert same.get_state()["position"] == 8

    (documents / "more.txt").write_text("something new " * 500)
    with pytest.raises(UserMistake, match=r"corpus=.*--data\.allow-changed True"):
        place(moved)
    allowed = dataclasses.replace(moved, data=dataclasses.replace(moved.data, allow_changed=True))
    held = (tmp_path / "run" / "config.json").read_text()
    assert json.loads(held) == config_to_json(moved), "the refused attempt has left no config"
    _, told, grown = place(allowed)
    assert "(corpus changed): an epoch begins with them" in told[-2]
    assert "the validation documents may be other ones" in told[-1]
    assert [grown.get_state()[name] for name in ("position", "epoch", "read")] == [8, 1, []]


def test_another_model_in_the_checkpoint_than_in_the_config_is_refused(config, finished):
    checkpoint = finished / "checkpoints" / "4"
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, mlp_width=128))
    told = r"^checkpoint (\S*/checkpoints/4) is of another config:\n  model\.mlp_width: 64 in"
    with pytest.raises(UserMistake, match=told):
        refuse_other_checkpoint(checkpoint, read_metadata(checkpoint), other)


def test_a_config_that_cannot_be_written_stops_nothing(config, place, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.workdir.write_atomically", full)
    history, told, _ = place(dataclasses.replace(config, log_every_num_steps=5))
    assert len(history.changes) == 1
    assert "config.json can't be written: No space left on device; it stays as it was" in told[-1]


def test_data_that_changes_under_a_run_ends_it_after_a_save_and_put_back_it_goes_on_exactly(
    config, tmp_path, rng, read_run, monkeypatch
):
    file = tmp_path / "tokens.bin"
    documents = [[*rng.integers(0, 256, rng.integers(20, 200)), 256] for _ in range(60)]
    content = np.concatenate(documents).astype("<u2").tobytes()
    file.write_bytes(content)
    data = DataConfig("bin", (str(file),), end_of_document_token=256, token_cache_dir=str(tmp_path / "cache"))
    evaluation = EvaluationConfig(every_num_steps=12, num_sequences=2)
    config = dataclasses.replace(config, data=data, num_steps=24, log_every_num_steps=8, evaluation=evaluation)
    undisturbed, disturbed = (claim_workdir(tmp_path / name, config) for name in ("undisturbed", "disturbed"))
    assert train(config, undisturbed, command=[], started=time.perf_counter()) == 0

    add = RunningWindow.add

    def add_and_change(window, *arguments):
        if window.num_steps == 3:
            file.write_bytes(content + bytes(2))
        return add(window, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunningWindow, "add", add_and_change)
        with pytest.raises(TrainingFailed, match=r"tokens\.bin was changed while this run was reading it"):
            train(config, disturbed, command=[], started=time.perf_counter())
    record, steps, _ = read_run(disturbed.path)
    assert (record["status"], "was changed" in record["message"]) == ("failed", True)
    assert [entry["step"] for entry in steps] == list(range(1, record["step"] + 1))
    assert [path.name for path in disturbed.checkpoints.iterdir()] == [str(record["step"])]
    assert 3 < record["step"] < 24

    file.write_bytes(content)
    assert train(config, disturbed, command=[], started=time.perf_counter()) == 0
    (_, expected, _), (_, steps, _) = read_run(undisturbed.path), read_run(disturbed.path)
    assert [entry["loss"] for entry in steps] == [entry["loss"] for entry in expected]
