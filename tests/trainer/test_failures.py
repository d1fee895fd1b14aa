"""What ends a run besides its steps is told in one message, and nothing hides what went wrong first."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import signal
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config_file import load_config
from trainer.errors import TrainingFailed, UserMistake
from trainer.event_loops import DrainingEventLoop
from trainer.flops import StepFlops
from trainer.loop import TrainingLoop
from trainer.metrics_log import MetricsLog
from trainer.prepare import prepare
from trainer.record import TimeAccount
from trainer.run import run
from trainer.step import StepMetrics
from trainer.workdir import claim_workdir


@pytest.fixture
def config(trainer_command):
    return load_config(trainer_command.config)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_the_imports_leaves_with_75(trainer_command, tmp_path, name):
    process = trainer_command.start("--workdir", tmp_path / "run", PYTHONPROFILEIMPORTTIME="1")
    for line in process.stderr:
        if line.endswith(" numpy.version\n"):  # just imported, with most of NumPy and all of JAX to come
            break
    process.send_signal(signal.Signals[name])
    stopped = trainer_command.finish(process)
    assert stopped.status == 75
    assert stopped.output == f"{name}: stopped before the first step; run the same command again\n"
    assert "Traceback" not in stopped.errors
    assert not (tmp_path / "run").exists()


def test_devices_that_cannot_start_are_told_in_one_message(trainer_command, tmp_path):
    finished = trainer_command.run("--workdir", tmp_path, JAX_PLATFORMS="no_such_platform")
    assert finished.status == 1
    assert finished.errors.startswith("error: JAX can't start its devices: ")
    assert "no_such_platform" in finished.errors
    assert "JAX_PLATFORMS=cpu always works" in finished.errors
    assert "Traceback" not in finished.errors


def test_a_bug_is_not_taken_for_a_mistake_of_the_user(config, monkeypatch):
    def defective(*_):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr("trainer.prepare.make_trainer", defective)
    with pytest.raises(ValueError, match="could not be broadcast") as caught:
        prepare(config, lambda _: None)
    assert type(caught.value) is ValueError


def test_a_backend_that_cannot_serve_is_the_users_mistake(config):
    model = dataclasses.replace(config.model, implementation="cudnn")
    with pytest.raises(UserMistake, match="implementation='cudnn' can't serve this call"):
        prepare(dataclasses.replace(config, model=model), lambda _: None)


def test_a_record_that_cannot_be_written_does_not_hide_why_the_run_failed(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def fail(*_):
        monkeypatch.setattr("trainer.record.write_atomically", full)
        raise TrainingFailed("what went wrong first")

    monkeypatch.setattr("trainer.run.prepare", fail)
    with pytest.raises(TrainingFailed, match="what went wrong first"):
        run(config, claim_workdir(tmp_path, config), command=[], started=time.perf_counter())


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process's files")
def test_a_save_that_fails_ends_the_run_and_is_told_once(trainer_command, tmp_path, read_run):
    process = trainer_command.start("--workdir", tmp_path, "--checkpoint.every-num-steps", 1000)
    for line in process.stdout:
        if line.startswith("step 1/60"):
            break
    # The state's arrays no longer fit into a file; all else that is still to be written does.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
    stopped = trainer_command.finish(process)
    assert stopped.status == 1
    record, steps, _ = read_run(tmp_path)
    assert (record["status"], len(steps)) == ("failed", 60)
    message = record["message"]
    assert message.startswith(f"saving checkpoint {tmp_path}/checkpoints/60 failed: ")
    assert "File too large" in message
    assert "the newest good checkpoint is not there yet" in message
    assert stopped.errors == f"error: {message}\n"


def test_an_event_loop_ends_what_was_begun_in_it_before_it_closes():
    ended = []

    async def fail():
        raise OSError(28, "No space left on device")

    async def write(name: str, *following: str):
        for _ in range(100):
            await asyncio.sleep(0)
        ended.append(name)
        await asyncio.gather(*map(write, following))

    async def save():
        await asyncio.gather(fail(), write("second", "third"), write("fourth"))

    loop = DrainingEventLoop()
    with pytest.raises(OSError, match="No space left"):
        loop.run_until_complete(save())
    assert not ended
    loop.close()
    assert sorted(ended) == ["fourth", "second", "third"]
    loop.close()


class Watched:
    """A console that keeps what it is told, and does nothing else."""

    def __init__(self):
        self.told: list[tuple] = []

    def __getattr__(self, name):
        return lambda *arguments: self.told.append((name, *arguments))


class EndlessBatches:
    """Batches of padding."""

    def __next__(self):
        return {"segment_ids": np.zeros((2, 256), np.int32)}

    def close(self):
        pass


@pytest.fixture
def make_loop(config, tmp_path):
    """Makes a loop whose steps take no time and no device."""

    def make(console: Watched) -> TrainingLoop:
        setup = SimpleNamespace(
            config=config,
            batches=EndlessBatches(),
            put=lambda batch: batch,
            flops=lambda _: StepFlops(1, 2),
            devices=[None],
            peak=SimpleNamespace(flops_per_s=1e12),
        )
        workdir = claim_workdir(tmp_path / "run", config)
        loop = TrainingLoop(
            setup, workdir, console, None, TimeAccount(time.perf_counter()), SimpleNamespace(requested=False)
        )
        metrics = StepMetrics(*map(jnp.asarray, (1.0, 0.0, 1.0, 1.0, 512, True)))
        loop._programs = SimpleNamespace(train_step=lambda state, _: (state, metrics))
        loop._state = jnp.zeros(())
        loop._metrics = MetricsLog(workdir.metrics, workdir.tensorboard, 0)
        return loop

    return make


def test_the_bar_never_shows_a_step_that_may_not_be_done(make_loop):
    console = Watched()
    loop = make_loop(console)
    loop._run_window()
    assert console.told[0] == ("advance", 0), "the first step is only dispatched"
    console.told.clear()
    loop._run_window()
    advances = [arguments[0] for name, *arguments in console.told if name == "advance"]
    assert advances == [1, 1, 2, 3, 4, 5, 6], "steps 2 to 8, of which two may be under way"
    loop.close()


def test_a_save_that_fails_while_an_error_ends_the_run_is_only_noted(make_loop, monkeypatch):
    console = Watched()
    loop = make_loop(console)

    def fail():
        raise TrainingFailed("saving checkpoint 20 failed")

    close = loop._checkpoints.close
    monkeypatch.setattr(loop._checkpoints, "close", fail)
    loop.close()
    close()
    assert ("note", "saving checkpoint 20 failed") in console.told
