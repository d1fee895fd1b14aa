"""A name that isn't known is answered with the one that was meant."""

import pytest

from trainer.config import OptimizerConfig
from trainer.config.file import flag_types
from trainer.config.suggestions import OTHER_WORDS, did_you_mean_field

FLAGS = [f"--{name.replace('_', '-')}" for name in ["config", "workdir", *flag_types()]]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr", "--optimizer.learning-rate"),
        ("--optimizer.lr", "--optimizer.learning-rate"),
        ("--steps", "--num-steps"),
        ("--batch", "--batch-size"),
        ("--optim", "--optimizer.kind"),
        ("--Seq-Len", "--sequence-length"),
        ("--vocab-size", "--model.vocab-size"),
        ("--context", "--mesh.context"),
        ("--every-num-steps", "--evaluation.every-num-steps or --checkpoint.every-num-steps"),
        ("--optimizer.learning-rat", "--optimizer.learning-rate"),
        ("--confg", "--config"),
        ("--tp", "--mesh.tensor"),
        ("--mesh.model", "--mesh.tensor"),
        ("--mesh.tensr", "--mesh.tensor"),
        ("--model.vocab", "--model.vocab-size"),
        ("--model.is-causal", "--model.masks"),
        ("--sliding_window", "--model.masks"),
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


def test_common_words_stand_for_real_fields_and_hide_none():
    assert set(OTHER_WORDS.values()) <= flag_types().keys()
    assert not OTHER_WORDS.keys() & flag_types().keys()
