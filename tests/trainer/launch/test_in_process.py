"""`trainer.run`: a run inside of a process that isn't its own."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import trainer
from trainer.config.file import load_config
from trainer.errors import UserMistake
from trainer.launch.signals import StopRequest
from trainer.loop.attempt import attempt
from trainer.workdir import claim_workdir


@pytest.fixture
def config(trainer_command):
    return load_config(trainer_command.config)


@pytest.fixture
def trained(monkeypatch):
    """What `train` was given, in the place of training."""
    given = []

    def train(config, workdir, **others):
        given.append((config, workdir.path, others))
        workdir.record.write_text('{"status": "completed"}')
        return 0

    monkeypatch.setattr("trainer.train.train", train)
    return given


def test_importing_the_trainer_imports_nothing_that_takes_long():
    code = "import sys, trainer; print(callable(trainer.run), {'jax', 'flax', 'numpy', 'tyro'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout == "True set()\n", done.stderr


def test_a_run_returns_its_record(trained, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trainer.run(config, "runs/x") == {"status": "completed"}
    ((given, path, others),) = trained
    assert (given, path) == (config, tmp_path / "runs" / "x")
    assert others["owns_process"] is False
    assert others["command"] == ["trainer.run"]
    assert json.loads((path / "config.json").read_text())["name"] == "tiny"
    assert callable(trainer.run), "no submodule has taken the function's place"


def test_the_workdir_is_free_again_whatever_becomes_of_the_run(trained, config, tmp_path, monkeypatch):
    trainer.run(config, tmp_path)
    trainer.run(config, tmp_path)

    def fail(*_, **__):
        raise RuntimeError("on purpose")

    monkeypatch.setattr("trainer.train.train", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.run(config, tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(UserMistake, match="is of another config"):
            trainer.run(dataclasses.replace(config, seed=config.seed + 1), tmp_path)
    with claim_workdir(tmp_path, config), pytest.raises(UserMistake, match="in use by another run"):
        trainer.run(config, tmp_path)


def test_a_config_is_checked_as_a_page_is(trained, config, tmp_path):
    with pytest.raises(UserMistake, match=r"config is of type dict; expected a trainer\.config\.TrainConfig"):
        trainer.run({"name": "x"}, tmp_path)
    with pytest.raises(UserMistake, match=r"num_steps=60\.0 is of type float; expected int; write 60"):
        trainer.run(dataclasses.replace(config, num_steps=60.0), tmp_path)
    assert trained == []
    assert list(tmp_path.iterdir()) == []


def test_a_model_to_begin_with_is_put_in(trained, pretrained, tmp_path):
    page = load_config(pretrained.page)
    trainer.run(dataclasses.replace(page, init_from=str(pretrained.folder)), tmp_path)
    assert trained[0][0].model == dataclasses.replace(
        pretrained.model, compute_dtype="float32", remat="none", implementation="reference"
    )
    model = dataclasses.replace(page.model, num_layers=7)
    other = dataclasses.replace(page, init_from=str(pretrained.folder), model=model)
    with pytest.raises(UserMistake, match="holds another model than the config asks for"):
        trainer.run(other, tmp_path)


def test_one_of_several_processes_is_refused(trained, config, tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    with pytest.raises(UserMistake, match=r"trainer\.run is built for one process"):
        trainer.run(config, tmp_path)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_first_ctrl_c_asks_and_the_second_raises():
    before = signal.getsignal(signal.SIGINT)
    told = []
    request = StopRequest(lambda *signal: told.append(signal), owns_process=False)
    with pytest.raises(KeyboardInterrupt), request as stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stop.requested and told)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        assert told == [("SIGTERM", None)]
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: False)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_heeds_no_signals_and_leaves_them_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter():
        with StopRequest(lambda *_: None, owns_process=False) as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_a_stop_before_the_first_step_does_not_end_the_process(config, tmp_path):
    start = {"command": [], "started": time.perf_counter(), "ending": None, "owns_process": False}
    with claim_workdir(tmp_path, config) as workdir, attempt(config, workdir, **start) as this:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: this.stop.requested)
        assert this.record["status"] == "running"


def test_a_second_ctrl_c_is_recorded_as_a_stop(config, tmp_path):
    start = {"command": [], "started": time.perf_counter(), "ending": None, "owns_process": False}
    with (
        pytest.raises(KeyboardInterrupt),
        claim_workdir(tmp_path, config) as workdir,
        attempt(config, workdir, **start),
    ):
        raise KeyboardInterrupt
    record = json.loads(workdir.record.read_text())
    assert (record["status"], record["message"]) == ("preempted", "left at once by Ctrl-C, without saving")
