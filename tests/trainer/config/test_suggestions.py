"""A name that isn't known is answered with the one that was meant."""

from __future__ import annotations

import pytest

from trainer.cli.train_command import TrainCommand
from trainer.config import OptimizerConfig, TrainConfig
from trainer.config.file import flag_types
from trainer.config.suggestions import OTHER_WORDS, did_you_mean_field
from trainer.sample.sample_command import SampleCommand

FLAGS = [f"--{name.replace('_', '-')}" for name in ["config", "workdir", *flag_types()]]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr", "--optimizer.learning-rate"),
        ("--optimizer.lr", "--optimizer.learning-rate"),
        ("--max_iters", "--num-steps"),
        ("--N-Layer", "--model.num-layers"),
        ("--vocab-size", "--model.vocab-size"),
        ("--context", "--sequence-length or --mesh.context"),
        ("--eval-interval", "--evaluation.every-num-steps"),
        ("--every-num-steps", "--evaluation.every-num-steps or --checkpoint.every-num-steps"),
        ("--optimizer.learning-rat", "--optimizer.learning-rate"),
        ("--confg", "--config"),
        ("--mesh.model", "--mesh.tensor"),
        ("--mesh.tp", "--mesh.tensor"),
        ("--mesh.sequence", "--mesh.context"),
        ("--tensor-model-parallel-size", "--mesh.tensor"),
        ("--model", "--init-from"),
        ("--model.vocab", "--model.vocab-size"),
        ("--use_flash_attn", "--model.implementation"),
        ("--mesh.tensr", "--mesh.tensor"),
        ("--model.is-causal", "--model.masks"),
        ("--sliding-window", "--model.masks"),
    ],
)
def test_the_flag_that_was_meant(typed, meant):
    assert did_you_mean_field(typed, FLAGS) == f"; did you mean {meant}?"


def test_nothing_like_it_gets_no_suggestion():
    assert did_you_mean_field("--zzz", FLAGS) == ""
    assert did_you_mean_field("--model.pipeline", FLAGS) == ""


def test_an_axis_that_there_is_not_gets_those_that_there_are():
    """Letter by letter, `--mesh.pipeline` is near `--mesh.tensor`: they share the section."""
    told = "; there are --mesh.data, --mesh.fsdp, --mesh.tensor, --mesh.context"
    assert did_you_mean_field("--mesh.pipeline", FLAGS) == told


def test_a_config_class_knows_its_fields_without_their_section():
    assert did_you_mean_field("lr", vars(OptimizerConfig())) == "; did you mean learning_rate?"


def test_other_trainers_words_stand_for_real_fields_and_hide_none():
    # `python -m trainer.sample` has words of its own.
    sampling, training = set(flag_types(SampleCommand)), {*flag_types(TrainCommand), *flag_types(TrainConfig)}
    assert set(OTHER_WORDS.values()) <= training | sampling
    assert not OTHER_WORDS.keys() & training
