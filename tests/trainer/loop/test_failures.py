"""What ends a run besides its steps is told in one message, and nothing hides what went wrong first."""

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import trainer.train
from kernels import SplashTuning
from tests.trainer.loop.steps import EndlessBatches, end_well, record_of, saved, skip_updates, warnings_of
from trainer.__main__ import main
from trainer.checkpoints.training_state import find_damage
from trainer.config import SamplesConfig
from trainer.config.file import load_saved_config
from trainer.errors import DataUsedUpError, TrainingFailed, UserMistake
from trainer.observers.observer import Advanced
from trainer.train import prepare, take_steps
from trainer.train import train as run_training
from trainer.workdir import claim_workdir


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
    finished = trainer_command.run_alone("--workdir", tmp_path, JAX_PLATFORMS="no_such_platform")
    assert finished.status == 1
    assert re.match("error: JAX can't start its devices: .*no_such_platform.*JAX_PLATFORMS=cpu always", finished.errors)
    assert "Traceback" not in finished.errors


def test_a_bug_is_not_taken_for_a_mistake_of_the_user(config, monkeypatch):
    def defective(*_, **__):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr("trainer.train.make_step_functions", defective)
    with pytest.raises(ValueError, match="could not be broadcast") as caught:
        prepare(config, lambda _: None)
    assert type(caught.value) is ValueError


def test_a_backend_that_cannot_serve_is_the_users_mistake_before_the_first_step(config):
    def run_on(**model):
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))

    for implementation, named in (("cudnn", "'cudnn'"), (SplashTuning.square(128), "SplashTuning")):
        with pytest.raises(UserMistake, match=f"implementation={named}.* can't serve this call: runs on"):
            prepare(run_on(implementation=implementation), lambda _: None)
    decoding = run_on(decode_implementation="triton")
    prepare(decoding, lambda _: None)
    samples = SamplesConfig(prompts=("a",), num_tokens=3)
    told = r"model\.decode_implementation='triton' can't serve .*: runs on gpu, not on cpu; choose another, or None"
    with pytest.raises(UserMistake, match=told):
        prepare(dataclasses.replace(decoding, samples=samples), lambda _: None)


NO_SPACE = "No space left on device"


def full(*_, **__):
    raise OSError(28, NO_SPACE)


def make_loops(monkeypatch, train):
    """Has a run prepare nothing, and train by calling `train(record)`."""

    class Loop:
        progress = SimpleNamespace(under_way=lambda: "3 steps")

        def __init__(self, setup, workdir, this, traced):
            self.record = this.record

        def restore(self):
            pass

        def compile(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr("trainer.train.TrainingLoop", Loop)
    monkeypatch.setattr("trainer.train.take_steps", lambda loop: train(loop.record))
    monkeypatch.setattr("trainer.train.prepare", lambda *_: [SimpleNamespace(to_json=dict, facts=dict)])


def test_a_record_that_cannot_be_written_does_not_hide_why_the_run_failed(config, tmp_path, monkeypatch):
    def fail(*_):
        monkeypatch.setattr("trainer.observers.record.write_atomically", full)
        raise TrainingFailed("what went wrong first")

    monkeypatch.setattr("trainer.train.prepare", fail)
    with pytest.raises(TrainingFailed, match="what went wrong first"):
        run_training(config, claim_workdir(tmp_path, config), command=[], started=time.perf_counter())


@pytest.mark.parametrize(
    ("error", "raised", "status", "message"),
    [
        (SystemExit(0), TrainingFailed, "failed", "something other than the trainer called sys.exit(0)"),
        (KeyboardInterrupt(), KeyboardInterrupt, "preempted", "left at once by Ctrl-C, without saving"),
        (LookupError("no room"), LookupError, "failed", "LookupError: no room"),
        (TrainingFailed("not finite"), TrainingFailed, "failed", "not finite"),
    ],
)
def test_the_record_tells_every_ending_and_its_step(config, tmp_path, monkeypatch, error, raised, status, message):
    def train(record):
        record.put(step=17)
        raise error

    make_loops(monkeypatch, train)
    with pytest.raises(raised):
        run_training(config, claim_workdir(tmp_path, config), command=[], started=time.perf_counter())
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], record["step"], record["message"]) == (status, 17, message)


@pytest.mark.usefixtures("heeds_sighup")
@pytest.mark.parametrize("names", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGHUP", "SIGTERM", "SIGINT")])
def test_the_record_tells_that_ctrl_c_after_a_stop_signal_left_without_saving(config, tmp_path, monkeypatch, names):
    left = threading.Event()
    statuses = []

    def leave(status):
        statuses.append(status)
        left.set()

    def train(record):
        record.put(step=23)
        for name in names:
            os.kill(os.getpid(), signal.Signals[name])
        assert left.wait(10)
        return 0

    make_loops(monkeypatch, train)
    monkeypatch.setattr("trainer.launch.signals.os._exit", leave)
    run_training(config, claim_workdir(tmp_path, config), command=[], started=time.perf_counter())
    assert statuses == [130]
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], record["step"]) == ("preempted", 23)
    assert record["message"] == "left at once by Ctrl-C after a stop signal, without saving"


@pytest.mark.parametrize(("names", "left"), [(["SIGTERM"], []), (["SIGINT", "SIGINT"], [130])])
@pytest.mark.parametrize(("ending", "status"), [("failed", 1), ("completed", 0)])
def test_a_signal_at_a_runs_end_changes_neither_its_record_nor_its_status(
    trainer_command, tmp_path, monkeypatch, capsys, names, left, ending, status
):
    """Signals come while the ending is written into the record, and one more once `run` is over."""
    statuses = []

    def train(record):
        if ending == "failed":
            raise TrainingFailed("not finite")
        record.update(status="completed")
        return 0

    def write(path, content):
        path.write_text(content)
        if json.loads(content)["status"] == ending:
            for name in names:
                os.kill(os.getpid(), signal.Signals[name])

    def run_and_signal(*arguments, **options):
        try:
            return run_training(*arguments, **options)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    make_loops(monkeypatch, train)
    monkeypatch.setattr("trainer.observers.record.write_atomically", write)
    monkeypatch.setattr("trainer.launch.signals.os._exit", statuses.append)
    monkeypatch.setattr(trainer.train, "train", run_and_signal)
    assert main(["--config", str(trainer_command.config), "--workdir", str(tmp_path / "run")]) == status
    assert statuses == left
    output = capsys.readouterr().out
    told = [f"{name}: the run is ending already" for name in (names[0], "SIGTERM")]
    assert [line for line in output.splitlines() if line.startswith("SIG")] == told
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["status"], record["message"]) == (ending, "not finite" if ending == "failed" else None)


def test_the_record_never_tells_a_step_that_may_not_be_done(make_loop, monkeypatch):
    def advances() -> list[int]:
        told = [event.step for event in observed if isinstance(event, Advanced)]
        observed.clear()
        return told

    loop, observed = make_loop(), []
    monkeypatch.setattr(loop.observers, "observe", observed.append)
    loop.run_window()
    assert advances() == [0, 1], "the first step is only dispatched, then waited for"
    loop.run_window()
    assert advances() == [1, 1, 2, 3, 4, 5, 6, 8], "steps 2 to 8: two may be under way until all are waited for"


def test_a_stop_signal_is_told_the_steps_under_way_and_about_how_long_they_take(make_loop, monkeypatch):
    loop, told = make_loop(), []
    train_step = loop.programs.train_step

    def watch(state, batch):
        told.append((loop.progress.step + 1, loop.progress.under_way()))
        return train_step(state, batch)

    loop.programs.train_step = watch
    loop.run_window()
    assert told == [(1, "1 step")], "no step is measured yet"
    assert loop.progress.under_way() == "what is under way"
    told.clear()
    monkeypatch.setattr(loop.times, "typical_step_s", lambda: 0.5)
    loop.run_window()
    one, two, three = "1 step (about 500.0 ms)", "2 steps (about 1.0 s)", "3 steps (about 1.5 s)"
    assert told == [(2, one), (3, two), *((step, three) for step in range(4, 9))]


@pytest.mark.parametrize("place", ["write_atomically", "digests"])
def test_saves_that_fail_are_made_up_for_by_later_ones(make_loop, monkeypatch, place):
    """The first and the second save fail; the last succeeds at its third try."""
    loop = make_loop()
    monkeypatch.setattr("trainer.loop.saver._SAVE_AGAIN_AFTER_S", (0.0, 0.0, 0.0))
    failing = [20, 40, 60, 60]
    save, undone = loop.checkpoints.save, monkeypatch.context

    def save_or_fail(step, *arguments):
        if step not in failing:
            save(step, *arguments)
            return
        failing.remove(step)
        with undone() as patch:
            patch.setattr(f"trainer.checkpoints.training_state.{place}", full)
            save(step, *arguments)
            if loop.checkpoints._saving is not None:
                loop.checkpoints._saving.join()

    monkeypatch.setattr(loop.checkpoints, "save", save_or_fail)
    end_well(loop)
    assert take_steps(loop) == 0
    loop.close()
    warnings = warnings_of(loop)
    failed = r"saving checkpoint .*/(\d+) failed: OSError: \[Errno 28\] No space left"
    assert [re.match(failed, line)[1] for line in warnings] == ["20", "40", "60", "60"]
    assert all("the newest good checkpoint is not there yet" in line for line in warnings)
    assert all(line.endswith("can be written to. The next save tries again") for line in warnings)
    assert saved(loop) == ["60"]
    assert find_damage(loop.workdir.checkpoints / "60") is None
    assert record_of(loop)["status"] == "completed"


@pytest.fixture
def make_read_only(monkeypatch):
    """Has a folder behave as on a disk that was mounted read-only, whoever runs the tests."""

    def make(folder: Path) -> None:
        def refusing(function, is_writing=lambda arguments: True):
            def called(*arguments, **options):
                paths = [Path(item) for item in arguments if isinstance(item, str | os.PathLike)]
                if is_writing(arguments) and any(path.is_relative_to(folder) for path in paths):
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(paths[0]))
                return function(*arguments, **options)

            return called

        for name in ("mkdir", "replace", "rename", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))
        monkeypatch.setattr(os, "open", refusing(os.open, lambda arguments: arguments[1] & (os.O_WRONLY | os.O_RDWR)))
        monkeypatch.setattr(io, "open", refusing(io.open, lambda arguments: set("wax+") & set(arguments[1])))

    return make


def test_a_read_only_workdir_is_the_users_mistake(config, tmp_path, make_read_only):
    make_read_only(tmp_path)
    with pytest.raises(UserMistake) as refused:
        claim_workdir(tmp_path / "run", config)
    told = f"workdir {tmp_path / 'run'} can't be written: Read-only file system; choose another with --workdir"
    assert str(refused.value) == told


def test_a_workdir_that_becomes_read_only_ends_the_run_with_the_second_save(make_loop, make_read_only):
    loop = make_loop()
    end_well(loop)
    loop.run_window()
    loop.saver.save_at_last(loop.snapshot)
    make_read_only(loop.workdir.path)
    newest = loop.workdir.checkpoints / "1"
    with pytest.raises(TrainingFailed) as failed:
        take_steps(loop)
    loop.close()
    message = str(failed.value)
    assert message.startswith(f"saving checkpoint {newest.with_name('40')} failed: OSError: [Errno 30] Read-on")
    assert f"the newest good checkpoint is {newest}; " in message
    assert message.endswith("again: saving failed twice in the same way, and all further steps would be lost")
    assert find_damage(newest) is None
    warnings = warnings_of(loop)
    assert sum(line.startswith(f"{loop.workdir.metrics} can't be written: Read-only") for line in warnings) == 1
    assert sum("saving checkpoint" in line for line in warnings) == 2, "20 and 40"


def test_saves_that_fail_in_different_ways_or_with_a_success_between_do_not_end_the_run(make_loop, monkeypatch):
    loop = make_loop()
    monkeypatch.setattr("trainer.checkpoints.training_state._BETWEEN_REMOVALS_S", 0.0)
    real, causes = loop.checkpoints._write, iter(["EIO", "ESTALE", None, "ESTALE", "EIO", "EIO"])

    def fail(*arguments):
        if (cause := next(causes)) is not None:
            raise OSError(getattr(errno, cause), "it failed")
        return real(*arguments)

    def save(step):
        loop.progress.step = step
        loop.saver.save(loop.snapshot)

    monkeypatch.setattr(loop.checkpoints, "_write", fail)
    for step in range(1, 6):
        save(step)
    with pytest.raises(TrainingFailed, match="failed twice in the same way"):  # noqa: PT012
        save(6)
        save(7)
    assert saved(loop) == ["3"]
    monkeypatch.undo()


@pytest.mark.parametrize("error", [OSError(errno.EOPNOTSUPP, "Operation not supported"), ValueError("kvstore: no")])
def test_where_nothing_can_be_saved_no_step_is_made(make_loop, monkeypatch, error):
    loop = make_loop()

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(loop.checkpoints, "_publish", fail)
    with pytest.raises(TrainingFailed) as failed:
        loop.saver.rehearse(jax.devices())
    told = f"no checkpoint can be saved in {loop.workdir.checkpoints}: {type(error).__name__}: {error}; see that "
    assert (str(failed.value)[: len(told)], saved(loop)) == (told, [])


def test_a_rehearsal_leaves_nothing_and_a_full_disk_is_only_told(make_loop, monkeypatch):
    loop = make_loop()
    loop.saver.rehearse(jax.devices())
    assert (saved(loop), warnings_of(loop)) == ([], [])
    monkeypatch.setattr("trainer.checkpoints.training_state._BETWEEN_REMOVALS_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoints.training_state.digests", full)
        loop.saver.rehearse(jax.devices())
    [warning] = warnings_of(loop)
    assert NO_SPACE in warning
    loop.progress.step = 1
    loop.saver.save_at_last(loop.snapshot)
    assert saved(loop) == ["1"]


def test_saving_is_rehearsed_before_anything_is_compiled(make_loop, monkeypatch):
    loop = make_loop()

    def refuse(devices):
        assert devices == ["a device"]
        raise TrainingFailed("no checkpoint can be saved")

    resumed = SimpleNamespace(state=3, step=0, phase=0, config_history=loop.config_history, origin=None)
    monkeypatch.setattr("trainer.loop.training_loop.restore", lambda *_: resumed)
    loop.setup.functions = SimpleNamespace(mesh=SimpleNamespace(devices=np.array(["a device"])))
    monkeypatch.setattr(loop.saver, "rehearse", refuse)
    with pytest.raises(TrainingFailed, match="no checkpoint can be saved"):
        loop.restore()


def test_a_workdir_that_is_removed_under_a_run_is_made_again(make_loop):
    loop = make_loop()
    end_well(loop)
    loop.run_window()
    loop.saver.save_at_last(loop.snapshot)
    shutil.rmtree(loop.workdir.path)
    assert take_steps(loop) == 0
    loop.close()
    warnings = warnings_of(loop)
    told = f"workdir {loop.workdir.path} was removed; it is made again, for what follows"
    assert [line for line in warnings if "removed" in line] == [told]
    assert saved(loop) == ["40", "60"]
    assert load_saved_config(loop.workdir.config) == loop.config
    assert record_of(loop)["status"] == "completed"
    assert json.loads(loop.workdir.metrics.read_text().splitlines()[-1])["step"] == 60
    with pytest.raises(UserMistake, match="in use by another run"):
        claim_workdir(loop.workdir.path, loop.config)


def test_a_workdir_that_another_run_has_taken_meanwhile_is_left_to_it(make_loop):
    loop = make_loop()
    loop.run_window()
    shutil.rmtree(loop.workdir.path)
    other = claim_workdir(loop.workdir.path, loop.config)
    with pytest.raises(UserMistake, match="in use by another run"):
        loop.saver.save(loop.snapshot)
    assert list(other.checkpoints.iterdir()) == []


@pytest.mark.parametrize(("stop_requested", "num_tries"), [(False, 4), (True, 2)])
def test_a_last_save_that_always_fails_ends_the_run(make_loop, monkeypatch, stop_requested, num_tries):
    loop = make_loop()
    monkeypatch.setattr("trainer.loop.saver._SAVE_AGAIN_AFTER_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("trainer.checkpoints.training_state.digests", full)
    if stop_requested:
        loop.stop.requested = True
    loop.run_window()
    with pytest.raises(TrainingFailed, match=r"checkpoints/1 failed: OSError.*, then run the same command again$"):
        loop.saver.save_at_last(loop.snapshot)
    warnings = warnings_of(loop)
    assert len(warnings) == num_tries - 1
    assert not saved(loop)


def test_a_save_that_fails_does_not_hide_that_the_loss_was_not_finite(make_loop, monkeypatch):
    loop = make_loop()
    monkeypatch.setattr("trainer.checkpoints.training_state.digests", full)
    loop.run_window()
    loop.saver.save(loop.snapshot)
    skip_updates(loop, [2, *range(4, 12)])
    with pytest.raises(TrainingFailed, match=r"step 11: loss nan, .* not finite, like the 7 updates before, so"):
        take_steps(loop)
    warnings = warnings_of(loop)
    assert ["checkpoints/1 failed: OSError" in line for line in warnings] == [False, True]
    assert warnings[1].endswith("can be written to"), "no save will try again"


def test_a_checkpoint_that_cannot_be_removed_is_not_told_as_a_save_that_failed(make_loop, monkeypatch):
    loop = make_loop()
    monkeypatch.setattr(loop.checkpoints, "_remove_oldest", full)
    loop.run_window()
    loop.saver.save_at_last(loop.snapshot)
    assert saved(loop) == ["1"]
    [warning] = warnings_of(loop)
    assert warning.endswith("checkpoints/1 is saved, but an older one can't be removed: [Errno 28] " + NO_SPACE)


def test_a_stop_before_the_first_step_claims_no_checkpoint(make_loop, watched_console):
    loop = make_loop()
    loop.stop.requested = True
    loop.setup.corpus = SimpleNamespace(unigram_nats_per_token=2.0)
    loop.setup.devices = jax.devices()
    assert take_steps(loop) == 75
    loop.close()
    [(title, _)] = [told for kind, *told in watched_console.told if kind == "closing"]
    assert title == "stopped at step 0 of 60, with nothing to save yet; run the same command again"


def test_a_save_that_fails_while_an_error_ends_the_run_is_only_told(make_loop, watched_console, monkeypatch):
    loop = make_loop()

    def fail():
        raise TrainingFailed("saving checkpoint 20 failed")

    close = loop.checkpoints.close
    monkeypatch.setattr(loop.checkpoints, "close", fail)
    loop.close()
    close()
    assert ("warning", "saving checkpoint 20 failed") in watched_console.told


@pytest.mark.parametrize(
    ("num_processes", "failure", "expected"),
    [
        (1, TrainingFailed("the data can't be read"), ["4"]),
        (1, DataUsedUpError("all documents are used up"), ["4"]),
        (2, DataUsedUpError("all documents are used up"), ["4"]),
        (2, TrainingFailed("the data can't be read"), []),  # the other process may be able to read them
    ],
)
def test_steps_before_the_end_of_the_data_are_saved_where_every_process_ends_there(
    make_loop, num_processes, failure, expected
):
    loop = make_loop()
    batches = [next(loop.setup.batches)] * 4

    class Ending(EndlessBatches):
        def __next__(self):
            if not batches:
                raise failure
            return batches.pop()

    loop.setup.batches = Ending()
    loop.peers = SimpleNamespace(count=num_processes)
    with pytest.raises(TrainingFailed, match=str(failure)):
        take_steps(loop)
    loop.close()
    assert saved(loop) == expected
