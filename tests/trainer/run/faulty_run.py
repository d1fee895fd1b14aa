"""The trainer's command with a fault in it: `python -m tests.trainer.run.faulty_run FAULT [argument …]`.

FAULT is one of

    none
    hang-step     the device never finishes the second log window
    hang-data:7   the data never hold the batch of the attempt's seventh step
    hang-save     the second save never ends
    nan:3,4,9     the batches of these steps of the attempt make the loss and the gradient NaN
    raise:7       reading the batch of the attempt's seventh step raises an error of no kind that the trainer knows
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any

import trainer.checkpoints.training_state
import trainer.train
from trainer.__main__ import main


def hang_at_call(function: Any, number: int) -> Any:
    """The function, of which one call never returns."""
    calls = 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            threading.Event().wait()
        return function(*arguments)

    return called


class FaultyBatches:
    """A run's batches, of which those of some of the attempt's steps have gone through a function."""

    def __init__(self, batches: Any, steps: set[int], spoil: Callable[[Any], Any]):
        self._batches, self._steps, self._spoil, self._step = batches, steps, spoil, 0

    def __next__(self) -> Any:
        self._step += 1
        batch = next(self._batches)
        return self._spoil(batch) if self._step in self._steps else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def spoil_batches(steps: str, spoil: Callable[[Any], Any]) -> None:
    """Has each run in this process meet spoilt batches at some steps, told as in the command line."""
    make_batches = trainer.train.make_batches

    def make(*arguments: Any) -> Any:
        batches, *validation = make_batches(*arguments)
        return FaultyBatches(batches, {int(step) for step in steps.split(",")}, spoil), *validation

    trainer.train.make_batches = make


def poison(batch: Any) -> Any:
    """Puts tokens into a batch that aren't in the vocabulary: JAX reads NaN for them from the embedding."""
    return dataclasses.replace(batch, arrays=batch.arrays | {"tokens": batch.arrays["tokens"] + 1_000_000})


def fail(_: Any) -> Any:
    raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    match fault.partition(":"):
        case "hang-step", _, _:
            window = trainer.train.RunningWindow
            window.wait = hang_at_call(window.wait, 2)
        case "hang-save", _, _:
            checkpoints = trainer.checkpoints.training_state
            checkpoints.digests = hang_at_call(checkpoints.digests, 2)
        case "hang-data", _, steps:
            spoil_batches(steps, lambda _: threading.Event().wait())
        case "nan", _, steps:
            spoil_batches(steps, poison)
        case "raise", _, steps:
            spoil_batches(steps, fail)
        case "none", _, _:
            pass
        case _:
            raise SystemExit(f"no such fault: {fault}")
    sys.exit(main(arguments))
