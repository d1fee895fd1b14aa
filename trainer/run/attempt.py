"""One attempt at a run, from its config to its exit status."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from trainer.compile.out_of_memory import explained
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed, UserMistake
from trainer.observers.metrics import last_logged_step
from trainer.observers.record import RunRecord, TimeAccount
from trainer.process.event_loops import drain_event_loops
from trainer.process.signals import PREEMPTED, StopRequest
from trainer.run.loop import TrainingLoop
from trainer.run.prepare import prepare
from trainer.terminal.console import Console
from trainer.workdir import Workdir


def run(
    config: TrainConfig,
    workdir: Workdir,
    *,
    command: Sequence[str],
    started: float,
    ending: threading.Event | None = None,
) -> int:
    """Trains, going on from the workdir's newest checkpoint if there is one.

    Args:
      config: the experiment.
      workdir: claimed for this process.
      command: the command line, for the record.
      started: `time.perf_counter()` when the process began.
      ending: set once the run's exit status can't be changed by a stop signal any more.

    Returns:
      The exit status: 0 when all steps are done, 75 when a signal stopped the run after saving.

    Raises:
      UserMistake: data, mesh or model can't be used as the config says.
      TrainingFailed: the devices can't start, a device or this machine is out of memory, a loss or gradient was not
        finite, no checkpoint can be read, the last can't be saved, or something called `sys.exit`.
    """
    logging.getLogger("absl").addFilter(_is_no_exception_of_orbax)
    drain_event_loops()
    console, account = Console(), TimeAccount(started)
    console.description(config.description)
    for note in workdir.notes:
        console.warning(note)
    started_at = time.time() - account.total()
    record = RunRecord(workdir.record, command, started_at, account, console, last_logged_step(workdir.metrics))
    training: list[TrainingLoop] = []
    over = ending or threading.Event()

    def on_stop_signal(name: str) -> None:
        if over.is_set() or record["status"] != "running":
            console.note(f"{name}: the run is ending already")
        elif training:
            console.note(f"{name}: finishing {training[0].under_way()}, then saving; Ctrl-C (again) leaves at once")
        else:
            record.update(status="preempted", message=f"{name} before the first step of this attempt")
            console.note(f"{name}: stopped before the first step; run the same command again")
            os._exit(PREEMPTED)  # no handler of Python's would run while XLA compiles, and nothing is lost

    def on_second_ctrl_c() -> None:
        if record["status"] == "running":  # else the run has had its last word
            record.update(status="preempted", message="left at once by Ctrl-C after a stop signal, without saving")

    def fail(message: str) -> None:
        over.set()
        record.update(status="failed", message=message)

    # Outermost: the outer answer to a signal isn't this run's, and would be untrue while its end is being recorded.
    with StopRequest(on_stop_signal, on_second_ctrl_c) as stop:
        try:
            with explained(config, command, record):
                setup = prepare(config, console.note)
                record.update(**setup.to_json())
                console.opening(config.name, setup.facts() | {"workdir": str(workdir.path)})
                loop = TrainingLoop(setup, workdir, console, record, account, stop)
                try:
                    loop.restore_and_compile()
                    training.append(loop)
                    return loop.train()
                finally:
                    over.set()
                    loop.close()
        except SystemExit as exit:  # its status could be 0
            message = f"something other than the trainer called sys.exit({exit.code!r})"
            fail(message)
            raise TrainingFailed(message) from exit
        except BaseException as error:
            named = isinstance(error, UserMistake | TrainingFailed)
            kind = "" if named else type(error).__name__
            fail(": ".join(filter(None, (kind, str(error)))))
            raise


def _is_no_exception_of_orbax(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that Orbax's threads log: the exception is raised too, and told in one message."""
    return not (record.exc_info and "orbax" in record.pathname)
