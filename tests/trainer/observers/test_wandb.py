"""Weights & Biases hears of a run what TensorBoard does; here offline, so nothing leaves the machine."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import time

import pytest

from layers import GPTConfig
from trainer.compile.history import Recompile
from trainer.compile.recompilation import ArgumentChange
from trainer.compile.stages import CompileReport
from trainer.config import TrainConfig, WandbConfig
from trainer.errors import UserMistake
from trainer.observers.observer import (
    Ending,
    Evaluated,
    EvaluatedAtLength,
    Evaluation,
    LogWindow,
    Saved,
    Start,
    make_entry,
)
from trainer.observers.wandb import WeightsAndBiases
from trainer.terminal.console import Console
from trainer.train import prepare

CONFIG = TrainConfig(name="tiny", model=GPTConfig(), num_steps=200, wandb=WandbConfig("a-project", "offline"))

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""A PNG of one pixel."""


def make_window(first_step: int, *losses: float, **values: int) -> LogWindow:
    entries = [make_entry(step, {"loss": loss, **values}) for step, loss in enumerate(losses, first_step)]
    return LogWindow(entries[-1]["step"], 200, losses[-1], 1.0, 0.0, 1.0, 0.5, 1.0, entries)


def read_logged(folder, expected: set[bytes]) -> bytes:
    """What W&B keeps for `wandb sync`: records of names and JSON values, uncompressed.

    Its service writes the file, and on a busy machine still does after the run is finished: what is expected is waited
    for.
    """
    [path] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    end = time.monotonic() + 60
    while (missing := {value for value in expected if value not in path.read_bytes()}) and time.monotonic() < end:
        time.sleep(0.1)
    assert missing == set()
    return path.read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the wandb extra")
def test_an_offline_run_keeps_every_value_in_the_workdir(tmp_path):
    report = CompileReport("train_step", 1.25, 0.5, 60.0, False, None)
    observer = WeightsAndBiases(CONFIG, tmp_path, Console(), [32_768, 131_072])
    observer.observe(Start(0, 200, [], [report]))
    observer.observe(Recompile(2, "2026-01-01", report, (ArgumentChange("batch", "shape", "2", "3"),)))
    observer.observe(make_window(1, 3.125, 3.0625, float("nan"), phase=2))
    loss = make_entry(3, {"validation_nats_per_token": 2.6875, "validation_bits_per_byte": None})
    loss |= {"validation_digest": "5eed"}
    observer.observe(Evaluated(3, Evaluation(2.6875, None, 10), loss))
    heat_map = tmp_path / "retrieval.png"
    heat_map.write_bytes(PICTURE)
    observer.observe(EvaluatedAtLength(3, "a table", {"retrieval/niah_single/4096": 0.8125}, [heat_map]))
    observer.observe(Saved(3, tmp_path / "checkpoints" / "3"))
    observer.observe(Ending("completed", 3, tmp_path / "checkpoints" / "3", loss, 3.5, {}))
    observer.close()
    names = {b"loss", b"validation_nats_per_token", b"compile/train_step", b"checkpoint_step", b"phase/sequence_length"}
    names |= {b"retrieval/niah_single/4096", b"evaluation/retrieval"}
    values = {b"0.8125", b"3.125", b"3.0625", b"2.6875", b"131072", b"60", b"completed", b"a-project"}
    logged = read_logged(tmp_path, names | values)
    assert b"NaN" not in logged
    assert b"5eed" not in logged, "no curve"
    [kept] = (tmp_path / "wandb").glob("offline-run-*/files/media/images/evaluation/*.png")
    assert kept.read_bytes() == PICTURE


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the wandb extra")
def test_a_run_that_fails_is_closed_and_one_that_never_started_leaves_nothing(tmp_path):
    WeightsAndBiases(CONFIG, tmp_path, Console()).close()
    assert not (tmp_path / "wandb").exists()
    observer = WeightsAndBiases(CONFIG, tmp_path, Console())
    observer.observe(Start(0, 200, [], []))
    observer.observe(make_window(1, 3.125))
    observer.close()
    observer.close()
    read_logged(tmp_path, {b"3.125"})


class _LostRun:
    """W&B's run once its service is gone."""

    def __init__(self):
        self.summary = {}

    def log(self, values, step):
        raise ConnectionResetError("Connection lost")

    def finish(self, exit_code):
        raise ConnectionResetError("Connection lost")


def test_a_service_that_is_gone_is_warned_of_once_and_the_run_goes_on(tmp_path, capsys):
    observer = WeightsAndBiases(CONFIG, tmp_path, Console())
    observer._run = _LostRun()
    observer.observe(make_window(1, 3.125, 3.0625))
    observer.observe(Saved(3, tmp_path / "checkpoints" / "3"))
    observer.observe(Ending("completed", 3, tmp_path / "checkpoints" / "3", None, 3.5, {}))
    observer.close()
    told = capsys.readouterr().out
    assert told.count("warning: ") == 1
    assert "Weights & Biases failed (ConnectionResetError: Connection lost); the run goes on without it" in told


def test_a_missing_package_is_told_with_its_extra_before_anything_is_done(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserMistake,
        match=r"wandb.project='a-project' needs the wandb extra: `pip install -e '.\[wandb\]'` in the c",
    ):
        prepare(CONFIG, print)


def test_an_empty_project_is_refused():
    with pytest.raises(ValueError, match=r"wandb\.project='' names no project"):
        dataclasses.replace(CONFIG, wandb=WandbConfig(""))
