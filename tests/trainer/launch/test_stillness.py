"""What stands still for too long is noticed, once, and a process that slept itself blames nobody."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.launch.watchdog import StillnessWatch, Watched


class Clock:
    """Looks on behalf of the thread, every half second of its own time."""

    def __init__(self, watch: StillnessWatch):
        self.watch, self.now = watch, 100.0
        watch.look(self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.watch.look(self.now)


class Thing:
    """Something watched, with a limit of 10 seconds."""

    def __init__(self):
        self.sign, self.told = 0, []
        self.watched = Watched(lambda: self.sign, lambda seconds: seconds > 10, self.told.append)


@pytest.fixture
def thing() -> Thing:
    return Thing()


def test_what_stands_still_is_told_once_until_it_moves_again(thing):
    clock = Clock(StillnessWatch([thing.watched]))
    clock.run(10)
    assert not thing.told
    clock.run(1)
    assert thing.told == [10.5]
    clock.run(100)
    assert thing.told == [10.5]
    thing.sign = 1
    clock.run(11)
    assert thing.told == [10.5, 10.5]


def test_what_moves_on_or_has_nothing_to_do_is_never_late(thing):
    clock = Clock(StillnessWatch([thing.watched]))
    for thing.sign in range(20):
        clock.run(9)
    thing.sign = None
    clock.run(100)
    thing.sign = 19
    clock.run(10)
    assert not thing.told
    clock.run(1)
    assert thing.told


def test_after_a_sleep_everything_has_its_whole_time(thing):
    clock = Clock(StillnessWatch([thing.watched]))
    clock.run(5)
    clock.now += 3600  # SIGSTOP, or a laptop's lid
    clock.run(4)
    assert not thing.told, "of the hour, a second counts at most"
    clock.run(3)
    assert thing.told


def test_paused_seconds_do_not_count(thing):
    watch = StillnessWatch([thing.watched])
    clock = Clock(watch)
    clock.run(5)
    watch.is_paused = lambda: True
    clock.run(100)
    watch.is_paused = lambda: False
    clock.run(5)
    assert not thing.told
    clock.run(1)
    assert thing.told


def test_things_come_and_go(thing):
    other = Thing()
    watch = StillnessWatch([other.watched])
    clock = Clock(watch)
    clock.run(5)
    watch.add(thing.watched)
    clock.run(6)
    assert other.told
    assert not thing.told
    watch.remove(thing.watched)
    clock.run(100)
    assert not thing.told


def test_the_thread_looks_by_itself(thing):
    told = []
    quick = Watched(lambda: 0, lambda seconds: seconds > 0, told.append)
    with StillnessWatch([quick]):
        deadline = time.monotonic() + 30
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
    assert told


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
