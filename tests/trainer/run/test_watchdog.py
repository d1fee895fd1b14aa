"""A run that hangs is ended with status 70, stacks and a record; one that is only slow, or compiles, is not."""

from __future__ import annotations

import time

import pytest

from trainer.config import WatchdogConfig
from trainer.observers.times import StepTimes, TimeAccount
from trainer.run.watchdog import Watchdog

LIMITS = WatchdogConfig(factor=10.0, min_seconds=30.0, first_seconds=200.0)


class Run:
    """A watchdog over an account and step times, with a clock of its own."""

    def __init__(self, config: WatchdogConfig = LIMITS):
        self.account, self.times, self.told = TimeAccount(time.perf_counter()), StepTimes(), []
        self.watchdog = Watchdog(config, self.account, self.times, self.told.append)
        self.now = 0.0
        self.watchdog.watch.look(self.now)

    def take(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.watchdog.watch.look(self.now)


def test_a_step_hangs_when_it_takes_ten_times_the_median():
    run = Run()
    with run.account.measure("step"):
        run.take(199)
        assert not run.told, "the first has nothing to be compared with"
        run.take(3)
    assert run.told.pop() == "stalled: a step has taken 3 min 20 s, and none was done before"
    for _ in range(3):
        run.times.add_window(4, 4 * 6.0, 1, (0.5, 0.5))
    for _ in range(5):
        with run.account.measure("step"):
            run.take(59)
    assert not run.told
    with run.account.measure("step"):
        run.take(61)
    assert run.told == ["stalled: a step has taken 1 min 0 s, where 6.0 s is usual"]


def test_quick_things_have_the_shortest_limit():
    run = Run()
    run.times.add_window(1, 0.01, 1, (0.5, 0.5))
    with run.account.measure("step"):
        run.take(29)
    assert not run.told
    with run.account.measure("step"):
        run.take(32)
    assert len(run.told) == 1


@pytest.mark.parametrize(("activity", "name"), [("data_wait", "the wait for a batch"), ("evaluation", "an evaluation")])
def test_waits_for_data_and_evaluations_are_compared_with_their_own_kind(activity, name):
    run = Run()
    for _ in range(3):
        with run.account.measure(activity):
            run.take(150)
    assert not run.told, "the first three have nothing to be compared with"
    with run.account.measure(activity):
        run.take(31)
    [told] = run.told
    assert told.startswith(f"stalled: {name} has taken 30.5 s, where ")


def test_saves_are_watched_in_the_background():
    run = Run()
    for number in range(3):
        with run.watchdog.saving():
            with run.account.measure("step"):
                run.take(20)
            run.take(170 - 20 * number)
    assert not run.told
    with run.watchdog.saving():
        run.take(31)
    [told] = run.told
    assert told.startswith("stalled: a save has taken 30.5 s, where ")


def test_what_is_not_watched_may_take_as_long_as_it_takes():
    run = Run()
    run.take(10_000)
    for activity in ("compile", "checkpoint"):
        with run.account.measure(activity):
            run.take(10_000)
    assert not run.told


def test_a_watchdog_that_is_turned_off_starts_no_thread():
    run = Run(WatchdogConfig(enabled=False))
    with run.watchdog.watching(lambda: False):
        assert not run.watchdog.watch.is_running


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 1.0}, r"watchdog.factor=1.0 must be more than 1"),
        ({"min_seconds": 0.0}, r"watchdog.min_seconds=0.0 must be positive and finite; watchdog.enabled False"),
        ({"first_seconds": float("inf")}, r"watchdog.first_seconds=inf must be positive"),
    ],
)
def test_limits_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        WatchdogConfig(**fields)


@pytest.mark.parametrize(
    ("fault", "name", "place"), [("hang-step", "a step", "run_window"), ("hang-save", "a save", "_publish")]
)
def test_a_run_that_hangs_ends_with_70_its_stacks_and_a_record(trainer_command, tmp_path, read_run, fault, name, place):
    limits = ("--watchdog.min-seconds", 8, "--watchdog.first-seconds", 8)
    stalled = trainer_command.run("--workdir", tmp_path, *limits, module=f"tests.trainer.run.faulty_run {fault}")
    assert stalled.status == 70, stalled.errors
    record, steps, _ = read_run(tmp_path)
    assert record["status"] == "failed"
    assert record["message"].startswith(f"stalled: {name} has taken ")
    stacks = tmp_path / "stacks-0.txt"
    assert f"the threads' stacks are in {stacks}; run the same command again" in record["message"]
    assert stalled.errors.startswith(f"error: {record['message']}\n")
    for text in (stacks.read_text(), stalled.errors):
        assert f" in {place}\n" in text
        assert " in main\n" in text, "of every thread"
    assert record["step"] >= len(steps) > 0
