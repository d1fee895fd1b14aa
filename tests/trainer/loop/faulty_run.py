"""The trainer's command with a fault in it: `python -m tests.trainer.loop.faulty_run FAULT [argument …]`.

FAULT is one of

    none
    hang-step     the device never finishes the second log window
    hang-data:7   the data never hold the batch of the attempt's seventh step
    hang-save     the second save never ends
    raise:7       reading the batch of the attempt's seventh step raises an error of no kind that the trainer knows
"""

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any

import trainer.checkpoints.training_state
import trainer.loop.training_loop
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


def spoiled_batches(steps: set[int], spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    """A `make_batches` whose batches of some steps of the attempt have gone through a function."""
    make_batches = trainer.train.make_batches

    def make(*arguments: Any) -> Any:
        batches, *validation = make_batches(*arguments)
        return FaultyBatches(batches, steps, spoil), *validation

    return make


def poison(batch: Any) -> Any:
    """Puts tokens into a batch that aren't in the vocabulary: JAX reads NaN for them from the embedding."""
    return dataclasses.replace(batch, arrays=batch.arrays | {"tokens": batch.arrays["tokens"] + 1_000_000})


def fail(_: Any) -> Any:
    raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    name, _, told = fault.partition(":")
    steps = {int(step) for step in told.split(",") if step}
    match name:
        case "hang-step":
            window = trainer.loop.training_loop.RunningWindow
            window.wait = hang_at_call(window.wait, 2)
        case "hang-save":
            checkpoints = trainer.checkpoints.training_state
            checkpoints.digests = hang_at_call(checkpoints.digests, 2)
        case "hang-data":
            trainer.train.make_batches = spoiled_batches(steps, lambda _: threading.Event().wait())
        case "raise":
            trainer.train.make_batches = spoiled_batches(steps, fail)
        case "none":
            pass
        case _:
            raise SystemExit(f"no such fault: {fault}")
    sys.exit(main(arguments))
