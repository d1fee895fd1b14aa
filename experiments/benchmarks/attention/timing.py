"""Programs that are timed, and how: by turns, so that all of them see the same state of the device.

A call that is over in less time than the host takes to start a program would be timed as the host. In a training step
the calls of all layers are in one program, and so are those that are timed: as many as make a program long enough, one
after the other, each on inputs of its own. The number is the same for all contenders.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AttentionContender:
    """One backend, compiled, and its times.

    Attributes:
      start: starts one run and returns what `wait` waits for.
      length: of the problem that is timed; shorter than the case's where the dense backend doesn't fit.
      temporary_bytes: memory of the program besides arguments and results; None if unknown.
      clock: seconds since some moment.
      num_runs: consecutive runs that make one sample.
      calls_per_program: calls of attention that make one run.
      seconds: of one call, one per round.
    """

    backend: str
    start: Callable[[], Any]
    wait: Callable[[Any], Any]
    length: int
    compile_s: float
    temporary_bytes: int | None
    clock: Callable[[], float] = time.perf_counter
    num_runs: int = 1
    calls_per_program: int = 1
    seconds: list[float] = field(default_factory=list)

    def prepare(self, sample_ms: float) -> float:
        """Runs it twice, sees how many runs make a sample, and returns the seconds of a call in the second."""
        # The first run loads the program and allocates: to size a sample by it would leave the sample too short.
        self.time(1)
        seconds = self.time(1)
        self.num_runs = how_many_last(sample_ms, seconds * self.calls_per_program)
        return seconds

    def time(self, num_runs: int) -> float:
        """Seconds of one call in some runs in a row."""
        begin = self.clock()
        for _ in range(num_runs):
            result = self.start()
        self.wait(result)
        return (self.clock() - begin) / num_runs / self.calls_per_program


def how_many_last(milliseconds: float, seconds: float) -> int:
    """The number of runs of `seconds` each that last `milliseconds`."""
    return max(1, math.ceil(milliseconds / 1e3 / max(seconds, 1e-6)))


def time_in_rounds(groups: Iterable[Sequence[AttentionContender]], num_rounds: int, rest_ms: float = 0.0) -> None:
    """Adds one time per round to each contender, the groups in an order of its own for each round.

    A device at its power limit slows down for some time after a program that took much of it: in a fixed order, always
    for the same contender. What is subtracted from each other belongs in one group, whose members follow one another.
    Before each timing the device rests for `rest_ms`: a cool device runs short programs at its highest clock.
    """
    groups, order = list(groups), random.Random()
    for _ in range(num_rounds):
        for group in order.sample(groups, len(groups)):
            for contender in group:
                time.sleep(rest_ms / 1e3)
                contender.seconds.append(contender.time(contender.num_runs))


def speed_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median over the rounds of their time over ours."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
