"""A run that hangs is ended with status 70, stacks and a record; one that is only slow, or compiles, is not."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer.config import WatchdogConfig
from trainer.launch.watchdog import Watchdog
from trainer.observers.times import StepTimes, TimeAccount

LIMITS = WatchdogConfig(factor=10.0, min_seconds=30.0, first_seconds=200.0)


class Run:
    """A watchdog over an account and step times, with a clock of its own."""

    def __init__(self, config: WatchdogConfig = LIMITS):
        self.account, self.times, self.told = TimeAccount(time.perf_counter()), StepTimes(), []
        self.watchdog = Watchdog(config, self.account, self.times.typical_step_s, self.told.append)
        self.now = 0.0
        self.watchdog.look(self.now)

    def take(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.watchdog.look(self.now)


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
    assert run.told.pop().startswith(f"stalled: {name} has taken 30.5 s, where ")


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
    assert run.told.pop().startswith("stalled: a save has taken 30.5 s, where ")


def test_what_is_not_watched_may_take_as_long_as_it_takes():
    run = Run()
    run.take(10_000)
    for activity in ("compile", "checkpoint"):
        with run.account.measure(activity):
            run.take(10_000)
    assert not run.told


def test_after_a_sleep_and_while_compiling_nothing_is_late():
    run = Run()
    with run.account.measure("step"):
        run.take(150)
        run.now += 3600  # SIGSTOP, or a laptop's lid: a second counts at most
        run.take(45)
        run.watchdog._is_compiling = lambda: True
        run.take(10_000)
        run.watchdog._is_compiling = lambda: False
        run.take(2)
        assert not run.told
        run.take(5)
        assert len(run.told) == 1
        run.take(1000)
        assert len(run.told) == 1, "each is told of once"


def test_the_thread_looks_by_itself():
    run = Run(WatchdogConfig(factor=2.0, min_seconds=0.5, first_seconds=0.5))
    with run.watchdog.watching(lambda: False), run.account.measure("step"):
        deadline = time.monotonic() + 30
        while not run.told:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_watchdog_that_is_turned_off_starts_no_thread():
    run = Run(WatchdogConfig(enabled=False))
    with run.watchdog.watching(lambda: False):
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "name", "place"), [("hang-step", "a step", "run_window"), ("hang-save", "a save", "_finish")]
)
def test_a_run_that_hangs_ends_with_70_its_stacks_and_a_record(trainer_command, tmp_path, read_run, fault, name, place):
    limits = ("--watchdog.min-seconds", 8, "--watchdog.first-seconds", 8)
    stalled = trainer_command.run_alone("--workdir", tmp_path, *limits, module=f"tests.trainer.loop.faulty_run {fault}")
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


def test_last_words_that_hang_keep_nobody(tmp_path):
    """One word is said, one waits for ever, and the main thread is stuck inside C, where Python can't interrupt it."""
    script = (
        "import ctypes, threading, trainer.launch.process_exit as words\n"
        "words._LAST_WORDS_S = 1.0\n"
        "said = lambda: print('said', flush=True)\n"
        "leave = lambda: words.leave(70, said, threading.Event().wait, lambda: words.print_stacks('why'))\n"
        "threading.Timer(0.2, leave).start()\n"
        "libc = ctypes.CDLL(None)\n"
        "while True: libc.sleep(30)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (70, "said\n")
    assert done.stderr.startswith("why\n")
    assert 'File "<string>", line 7 in <module>' in done.stderr, "where the main thread is stuck"
