"""A run is evaluated at length at the ends of its phases, once at each step, and shows the results everywhere."""

import dataclasses
import time
from collections import Counter

import pytest

from trainer.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, Phase, TrainConfig
from trainer.config.file import load_config
from trainer.data.documents import Delimiters
from trainer.data.tokenizers import ByteTokenizer, PretokenizedIds
from trainer.errors import UserMistake
from trainer.evaluate.results import RETRIEVAL, read_lines
from trainer.loop.length_evaluator import make_run_examples
from trainer.train import train
from trainer.workdir import claim_workdir


@pytest.fixture(scope="module")
def config(trainer_command) -> TrainConfig:
    config = load_config(trainer_command.config)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=1, masks=config.model.masks[-1:], remat="none"),
        num_steps=4,
        sequence_length=64,
        phases=(Phase(num_steps=2), Phase(sequence_length=128)),
        optimizer=OptimizerConfig(learning_rate=1e-3, num_warmup_steps=2),
        evaluation=EvaluationConfig(
            every_num_steps=4, num_sequences=2, lengths=(512, 300), tasks=("key_values",), num_examples=1
        ),
        checkpoint=CheckpointConfig(every_num_steps=2),
    )


def test_phases_end_in_an_evaluation_and_a_step_has_one(config, tmp_path, capsys, read_tensorboard):
    workdir = claim_workdir(tmp_path / "run", config)
    assert train(config, workdir, command=["test"], started=time.perf_counter()) == 0
    lines = read_lines(workdir.path / "evaluations.jsonl")
    asked = Counter((line.step, line.length) for line in lines if line.kind == RETRIEVAL)
    assert asked == dict.fromkeys([(2, 300), (2, 512), (4, 300), (4, 512)], 10), "ten depths"
    assert {line.kind for line in lines} >= {"loss_by_position", "loss_of_last_tokens", "short_context_loss"}
    assert all(0 <= line.accuracy <= 1 for line in lines if line.kind == RETRIEVAL)
    told = capsys.readouterr().out
    assert "accuracy, step 2 → step 4" in told
    assert (workdir.path / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    # A run that begins with the state of this one is evaluated, too, every few steps.
    evaluation = dataclasses.replace(config.evaluation, lengths=(300,), lengths_every_num_steps=3)
    own = {"phases": (), "num_steps": 5, "init_from": str(workdir.path), "init_optimizer": "carry"}
    following = claim_workdir(tmp_path / "following", dataclasses.replace(config, evaluation=evaluation, **own))
    carried = dataclasses.replace(config, evaluation=evaluation, **own)
    assert train(carried, following, command=["test"], started=time.perf_counter()) == 0
    assert {line.step for line in read_lines(following.path / "evaluations.jsonl")} == {3, 5}
    # Resuming a run that is done evaluates nothing again, unless other lengths are asked for.
    assert train(config, workdir, command=["again"], started=time.perf_counter()) == 0
    assert read_lines(workdir.path / "evaluations.jsonl") == lines
    shorter = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, lengths=(300,)))
    assert train(shorter, workdir, command=["again"], started=time.perf_counter()) == 0
    added = read_lines(workdir.path / "evaluations.jsonl")[len(lines) :]
    assert {(line.step, line.length) for line in added if line.kind == RETRIEVAL} == {(4, 300)}


def test_what_cannot_be_asked_is_refused_before_a_device_starts(config):
    def with_evaluation(**changes) -> TrainConfig:
        return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, **changes))

    with pytest.raises(UserMistake, match="there is no task 'niah_singel'"):
        make_run_examples(with_evaluation(tasks=("niah_singel",)), ByteTokenizer())
    with pytest.raises(UserMistake, match="length=20 is too short for key_values"):
        make_run_examples(with_evaluation(lengths=(20,)), ByteTokenizer())
    with pytest.raises(UserMistake, match=r"a \.bin file doesn't say which tokenizer made it"):
        make_run_examples(config, PretokenizedIds(300, Delimiters(0, 0)))
    assert make_run_examples(with_evaluation(tasks=()), PretokenizedIds(300, Delimiters(0, 0))) == []
    with pytest.raises(ValueError, match=r"evaluation\.lengths=\(64, 64\) must be different"):
        with_evaluation(lengths=(64, 64))
