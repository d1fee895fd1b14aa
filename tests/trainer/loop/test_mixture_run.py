"""A run on a mixture: a checkpoint goes on with the next documents of every source, and the mixture is recorded."""

import dataclasses
import importlib.util
import json
import shutil
import time

import numpy as np
import pytest

from kernels import BlockwiseTuning, CausalMask
from trainer.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, Phase, SourceConfig, TrainConfig
from trainer.config.file import load_config
from trainer.train import train
from trainer.workdir import claim_workdir


@pytest.fixture(scope="module")
def config(trainer_command) -> TrainConfig:
    config = load_config(trainer_command.config)
    [documents] = config.data.files
    sources = (
        SourceConfig("few", (documents.replace("*", "[1-3]?"),), weight=1.0, when_exhausted="stop"),
        SourceConfig("many", (documents.replace("*", "*[4-9]"),), weight=3.0),
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, num_layers=1, masks=(CausalMask(),), implementation=BlockwiseTuning(32, 16)
        ),
        data=dataclasses.replace(config.data, source="stdlib", files=(), sources=sources),
        num_steps=6,
        sequence_length=64,
        optimizer=OptimizerConfig(learning_rate=1e-3, num_warmup_steps=2),
        evaluation=EvaluationConfig(every_num_steps=3, num_sequences=4),
        checkpoint=CheckpointConfig(every_num_steps=1, num_kept=6),
        phases=(
            Phase(num_steps=3),
            Phase(
                sequence_length=128,
                sources=tuple(
                    dataclasses.replace(source, weight=weight)
                    for source, weight in zip(sources, (3.0, 1.0), strict=True)
                ),
            ),
        ),
    )


def test_a_run_on_a_mixture_goes_on_to_the_bit_and_records_it(
    config, tmp_path, rng, read_run, read_tensorboard, capsys
):
    whole = claim_workdir(tmp_path / "whole", config)
    assert train(config, whole, command=["first"], started=time.perf_counter()) == 0
    record, steps, evaluations = read_run(whole.path)
    step = int(rng.integers(1, 6))
    killed = tmp_path / "killed"
    shutil.copytree(whole.path, killed)
    for later in range(step + 1, 7):
        shutil.rmtree(killed / "checkpoints" / str(later))
    resumed = claim_workdir(killed, config)
    assert train(config, resumed, command=["again"], started=time.perf_counter()) == 0
    again, steps_again, evaluations_again = read_run(killed)
    assert f"resumed at step {step}/6" in capsys.readouterr().out
    assert [each["loss"] for each in steps_again] == [each["loss"] for each in steps]
    losses = [{name: value for name, value in each.items() if name != "time"} for each in evaluations]
    assert [{name: each[name] for name in losses[0]} for each in evaluations_again] == losses
    assert again["mixture"] == record["mixture"]

    total = sum(each["num_tokens"] for each in record["mixture"].values())
    assert total == sum(each["num_targets"] for each in steps)
    assert record["data"]["sources"].keys() == {"few", "many"}
    assert losses[0].keys() >= {"validation_nats_per_token/few", "validation_nats_per_token/many"}
    shares = [each for each in map(json.loads, whole.metrics.open()) if "mixture/few" in each]
    assert {each["step"] for each in shares} >= {3, 6}
    of_phases = [[each["mixture/few"] for each in shares if (each["step"] > 3) == later] for later in (False, True)]
    assert np.mean(of_phases[0]) < 0.5 < np.mean(of_phases[1])
    for entry in shares:
        for prefix in ("mixture/", "mixture_lengths/"):
            assert sum(value for name, value in entry.items() if name.startswith(prefix)) == pytest.approx(1)
    tags = read_tensorboard(whole.tensorboard).keys()
    assert tags >= {"mixture/few", "mixture_lengths/0", "validation/nats_per_token/many"}
    if importlib.util.find_spec("matplotlib"):
        assert whole.mixture_picture.read_bytes().startswith(b"\x89PNG")
