"""What is known of a run's first parameters before they are read: the family they go out as, and their context."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig, LayerOverride, RopeScaling
from trainer.cli.train_command import parse_command_line
from trainer.config import Phase, TrainConfig
from trainer.errors import TrainingFailed
from trainer.export.family import describe_export
from trainer.launch.peers import Peers
from trainer.loop.origin import find_origin, longer_than_trained, read_origin
from trainer.terminal.console import Console
from trainer.train import train
from trainer.workdir import Workdir, claim_workdir

THEIRS = GPTConfig(num_layers=4, mlp="swiglu")
LLAMA3 = RopeScaling("llama3", 8.0, original_context_length=8192)
SCALING = "set --model.rope-scaling"
YARN = SCALING + ".kind yarn --model.rope-scaling.factor {} --model.rope-scaling.original-context-length {}"
WIDER = RopeScaling("yarn", 2.0, original_context_length=4096)
NOPE = {"masks": (LocalMask(9, 0), CausalMask()), "layer_overrides": (LayerOverride(rope_base=None),)}


def warning(length: int, context_length: int | None, theirs: dict, changes: dict) -> str | None:
    before = dataclasses.replace(THEIRS, **theirs)
    model = dataclasses.replace(before, **changes)
    config = TrainConfig("x", model, num_steps=200, sequence_length=length, init_from="/models/x")
    return longer_than_trained(config, before, context_length)


@pytest.mark.parametrize(
    ("length", "context_length", "theirs", "changes", "reach", "remedy"),
    [
        (8193, 8192, {}, {}, "8,192", YARN.format(2, 8192)),
        (32_768, 4096, {}, {"masks": (LocalMask(1023, 0), CausalMask())}, "4,096", YARN.format(8, 4096)),
        (32_768, 4096, {}, {"rope_scaling": RopeScaling("linear", 4.0)}, "16,384", YARN.format(8, 4096)),
        (32_768, 4096, {}, {"rope_scaling": WIDER}, "8,192", f"{SCALING}.factor 8"),
        (262_144, 131_072, {"rope_scaling": LLAMA3}, {}, "131,072", f"{SCALING}.factor 32"),
        (1024, 512, {}, {"masks": (LocalMask(512, 0),)}, "512", YARN.format(2, 512)),
    ],
)
def test_sequences_beyond_the_trained_context_are_warned_of(length, context_length, theirs, changes, reach, remedy):
    assert warning(length, context_length, theirs, changes) == (
        f"sequence_length={length} is more than the {reach} tokens that the model of init_from='/models/x' was trained "
        f"on or is scaled to, and it knows no positions past these; {remedy}, or a larger --model.rope-base"
    )


@pytest.mark.parametrize(
    ("length", "context_length", "theirs", "changes"),
    [
        (8192, 8192, {}, {}),
        (8192, None, {}, {}),
        (32_768, 4096, {}, {"rope_scaling": RopeScaling("ntk", 8.0)}),
        (32_768, 4096, {}, {"rope_base": 1e6}),
        (32_768, 8192, {"rope_scaling": LLAMA3}, {}),  # what config.json has may be the length before scaling
        (32_768, 4096, {"rope_base": None}, {}),
        (32_768, 4096, {}, {"masks": (LocalMask(1023, 0),)}),  # which sees no distance that is new
        (32_768, 4096, {}, NOPE),
    ],
)
def test_sequences_that_are_none_or_scaled_for_are_not(length, context_length, theirs, changes):
    assert warning(length, context_length, theirs, changes) is None


def test_each_phase_that_is_too_long_is_warned_of(pretrained, capsys):
    """The folder's model knows 128 positions."""
    arguments = ["--config", str(pretrained.page), "--init-from", str(pretrained.folder)]
    config = parse_command_line(arguments).train
    phases = (Phase(num_steps=1), Phase(num_steps=1, sequence_length=256), Phase(sequence_length=512, rope_base=1e5))
    find_origin(dataclasses.replace(config, num_steps=3, phases=phases), None, Console(), Peers())
    told = capsys.readouterr().out
    assert told.startswith("warning: phases[1]: sequence_length=256 is more than the 128 tokens that the model of")
    assert told.count("warning") == 1


def test_a_folder_tells_family_and_context(pretrained, tmp_path):
    assert read_origin(pretrained.folder) == {"family": "llama", "context_length": 128}
    values = json.loads((pretrained.folder / "config.json").read_text())
    for given, expected in (
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 4096}}, {"context_length": 4096}),
        ({"max_position_embeddings": None}, {}),
        ({"max_position_embeddings": "x"}, {}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | given))
        assert read_origin(tmp_path) == {"family": given.get("model_type", "llama")} | expected


def test_a_workdir_tells_the_longest_that_its_parameters_have_seen(pretrained, tmp_path):
    config = parse_command_line(["--config", str(pretrained.page)]).train
    workdir = claim_workdir(tmp_path / "run", config)
    assert read_origin(workdir.path) == {"context_length": 64}
    for length in (32, 4096):
        workdir.record.write_text(json.dumps({"init_from": {"family": "qwen3", "context_length": length}}))
        assert read_origin(workdir.path) == {"family": "qwen3", "context_length": max(64, length)}


def test_a_run_says_both_before_it_starts_and_warns_once(pretrained, tmp_path, monkeypatch, capsys):
    """The data is yet to be opened, which may take an hour."""

    def start(workdir: Workdir) -> str:
        with pytest.raises(TrainingFailed, match="of the test"):
            train(config, workdir, command=["test"], started=time.perf_counter())
        assert "export" in (panel := capsys.readouterr().out)
        assert "as a llama" in panel
        return before.pop()

    def prepare(*_):
        before.append(capsys.readouterr().out)
        return [SimpleNamespace(to_json=dict, facts=dict)]

    def end(*_):
        raise TrainingFailed("the end of the test")

    before: list[str] = []
    monkeypatch.setattr("trainer.train.prepare", prepare)
    monkeypatch.setattr("trainer.train.TrainingLoop", end)
    arguments = ["--config", str(pretrained.page), "--init-from", str(pretrained.folder), "--sequence-length", "256"]
    config = parse_command_line(arguments).train
    workdir = claim_workdir(tmp_path / "run", config)
    told = "warning: sequence_length=256 is more than the 128 tokens that the model of init_from="
    assert start(workdir).count(told) == 1
    # Once its parameters have been loaded, it has taken another context or none.
    values = json.loads(workdir.record.read_text())
    workdir.record.write_text(json.dumps(values | {"init_from": {"family": "llama", "context_length": 128}}))
    assert told not in start(workdir)


def test_one_of_several_processes_warns(watched_console):
    # The folder may be gone when a run resumes, and other processes have no record that would tell.
    config = TrainConfig("x", THEIRS, num_steps=200, sequence_length=256, init_from="/models/gone")
    assert find_origin(config, None, watched_console, Peers(index=1)) == {}
    recorded = {"family": "llama", "context_length": 128}
    assert find_origin(config, recorded, watched_console, Peers()) == recorded
    assert watched_console.told == []


def test_the_panel_says_as_what_family_the_model_goes_out():
    window = dataclasses.replace(THEIRS, masks=(LocalMask(7, 0),))
    for model, began_as, told in (
        (THEIRS, None, "as a llama"),
        (THEIRS, "mistral", "as a mistral"),
        (THEIRS, "gemma2", "as a llama"),
        (window, "llama", "as a mistral"),
        (GPTConfig(), None, "as no family of transformers: the nearest, llama has model.mlp=swiglu (here gelu)"),
    ):
        assert describe_export(model, began_as) == told
