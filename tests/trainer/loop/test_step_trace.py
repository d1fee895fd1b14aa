"""--profile-steps traces those steps and no others, and never ends a run."""

import re

import jax
import pytest

from trainer.cli.train_command import parse_command_line
from trainer.errors import UserMistake
from trainer.loop.step_trace import StepTrace
from trainer.loop.training_loop import TrainingLoop
from trainer.train import take_steps


@pytest.fixture
def profiler(monkeypatch):
    """What the profiler was told, in order, in its place."""
    told: list = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: told.append(f"start {folder.name}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: told.append("stop"))
    return told


@pytest.fixture
def make_traced(make_loop, profiler, monkeypatch):
    """A loop that traces some steps; its steps and waits are told with the profiler's."""
    monkeypatch.setattr(TrainingLoop, "end", lambda _: 0)

    def make(traced: range, **changed) -> TrainingLoop:
        loop = make_loop(**changed)
        loop.trace = StepTrace(traced, loop.workdir.profile, loop.console)
        dispatch = loop.programs.train_step
        loop.programs.train_step = lambda *given: profiler.append(loop.progress.step + 1) or dispatch(*given)
        loop.evaluator.evaluations |= {step: {} for step in range(61)}
        return loop

    return make


def test_exactly_those_steps_are_traced_between_two_idle_moments(make_traced, profiler, monkeypatch):
    loop = make_traced(range(10, 14), num_steps=20)
    waited = []
    block = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(len(profiler)) or block(x))
    take_steps(loop)
    loop.close()
    assert profiler == [*range(1, 10), "start profile", 10, 11, 12, 13, "stop", *range(14, 21)]
    assert {profiler.index("start profile"), profiler.index("stop")} <= set(waited), "the device is idle at both ends"
    assert f"steps 10 to 13 are traced in {loop.workdir.profile}" in str(loop.console.told)


def test_a_trace_that_a_stop_cuts_short_is_written(make_traced, profiler):
    loop = make_traced(range(3, 50), num_steps=60)
    dispatch = loop.programs.train_step

    def stop_at_5(*given):
        loop.stop.requested = loop.progress.step + 1 >= 5
        return dispatch(*given)

    loop.programs.train_step = stop_at_5
    take_steps(loop)
    loop.close()
    assert profiler == [1, 2, "start profile", 3, 4, 5, "stop"]


def test_steps_behind_a_resumed_run_are_told(make_loop, profiler):
    loop = make_loop()
    trace = StepTrace(range(3, 6), loop.workdir.profile, loop.console)
    trace.check(2)
    assert not [line for line in loop.console.told if "traced" in str(line)]
    trace.check(3)
    assert loop.console.told[-1] == ("warning", "steps 3 to 5 can't be traced: the run goes on from step 3")


def test_a_profiler_that_fails_ends_no_run(make_traced, profiler, monkeypatch):
    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    loop = make_traced(range(2, 4), num_steps=5)
    take_steps(loop)
    loop.close()
    assert profiler == [1, "start profile", 2, 3, 4, 5]
    told = f"steps 2 to 3 can't be traced in {loop.workdir.profile}: no room"
    assert ("warning", told) in loop.console.told


def test_another_process_splits_its_steps_alike_and_traces_nothing(make_loop, profiler):
    loop = make_loop()
    trace = StepTrace(range(3, 6), loop.workdir.profile, loop.console, is_first=False)
    trace.begin_if_due(3)
    trace.end_if_due(5)
    assert [step for step in range(9) if trace.splits(step)] == [2, 5]
    assert profiler == []


def test_the_trace_is_one_that_xprof_reads(make_loop):
    loop = make_loop()
    trace = StepTrace(range(1, 2), loop.workdir.profile, loop.console)
    trace.begin_if_due(1)
    with trace.around(1):
        jax.numpy.zeros(3).block_until_ready()
    trace.end_if_due(1)
    (written,) = loop.workdir.profile.glob("plugins/profile/*/*.xplane.pb")
    assert b"train_step" in written.read_bytes()
    assert b"step_num" in written.read_bytes()


@pytest.mark.parametrize(("text", "steps"), [("10:13", range(10, 14)), ("7", range(7, 8)), ("60:60", range(60, 61))])
def test_steps_are_read(trainer_command, text, steps):
    command = parse_command_line(["--config", str(trainer_command.config), "--profile-steps", text])
    assert command.traced == steps


@pytest.mark.parametrize("text", ["", "0:3", "5:4", "3:61", "a", "1:2:3", "-1:3", "1e1:13", "٣:٤", "9" * 20])
def test_other_steps_are_refused(trainer_command, text):
    command = parse_command_line(["--config", str(trainer_command.config), f"--profile-steps={text}"])
    told = rf"--profile-steps {re.escape(text)}: expected FIRST:LAST, two steps from 1 to num_steps=60; "
    with pytest.raises(UserMistake, match=told):
        _ = command.traced
