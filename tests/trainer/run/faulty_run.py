"""The trainer's command with a fault in it: `python -m tests.trainer.run.faulty_run FAULT [argument …]`.

FAULT is one of

    hang-step     the device never finishes the second log window
    hang-save     the second save never ends
    nan:3,4,9     the batches of these steps of the attempt make the loss and the gradient NaN
"""

from __future__ import annotations

import sys
import threading
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


class PoisonedBatches:
    """Batches of which some hold a token that isn't in the vocabulary: JAX reads it as NaN from the embedding."""

    def __init__(self, batches: Any, steps: set[int]):
        self._batches, self._steps, self._step = batches, steps, 0

    def __next__(self) -> Any:
        self._step += 1
        batch = next(self._batches)
        if self._step in self._steps:
            batch = batch | {"tokens": batch["tokens"] + 1_000_000}
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def poison(steps: set[int]) -> None:
    make_batches = trainer.train.make_batches

    def make(*arguments: Any) -> Any:
        batches, validation_batches = make_batches(*arguments)
        return PoisonedBatches(batches, steps), validation_batches

    trainer.train.make_batches = make


if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    match fault.partition(":"):
        case "hang-step", _, _:
            window = trainer.train.RunningWindow
            window.wait = hang_at_call(window.wait, 2)
        case "hang-save", _, _:
            checkpoints = trainer.checkpoints.training_state
            checkpoints.digests = hang_at_call(checkpoints.digests, 2)
        case "nan", _, steps:
            poison({int(step) for step in steps.split(",")})
        case _:
            raise SystemExit(f"no such fault: {fault}")
    sys.exit(main(arguments))
