"""The frame of an attempt at a run: its console and record, its stop signals, and how its end is recorded."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from trainer.compile.out_of_memory import explained
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed, UserMistake
from trainer.export.family import describe_export
from trainer.launch.membership import ALONE, Farewell, Membership
from trainer.launch.process_exit import INTERRUPTED, PREEMPTED, STALLED, leave, print_stacks, write_stacks
from trainer.launch.signals import StopRequest
from trainer.loop.setup import Setup
from trainer.observers.metrics import last_logged
from trainer.observers.record import RunRecord
from trainer.observers.times import TimeAccount
from trainer.terminal.console import Console, QuietConsole
from trainer.workdir import Workdir


class Attempt:
    """An attempt's console, record, account of time and stop signals.

    Args:
      config: the experiment.
      workdir: where everything is written.
      command: the command line, for the record.
      account: of the attempt's time.
      over: set once a stop signal can no longer change the exit status.
      membership: of this process among those that train together. Only process 0 prints and writes.
      owns_process: whether a stop signal may end the process.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: Workdir,
        command: Sequence[str],
        account: TimeAccount,
        over: threading.Event,
        membership: Membership,
        owns_process: bool = True,
    ):
        self.account, self.over, self.peers = account, over, membership.peers
        is_first = self.peers.is_first
        self.console = Console() if is_first else QuietConsole(f"process {self.peers.index}")
        if config.description:
            self.console.note(config.description)
        started_at = time.time() - account.total()
        self.record = RunRecord(
            workdir.record if is_first else None,
            command,
            started_at,
            account,
            self.console,
            last_logged(workdir.metrics) if is_first else (0, 0.0),
        )
        self._owns_process = owns_process
        self.stop = StopRequest(self._on_stop_signal, self._on_second_ctrl_c, membership, owns_process=owns_process)
        membership.on_end = self._record_end
        self.under_way: Callable[[], str] | None = None
        """Says what a stop has to wait for before it saves; None: there is nothing to save yet."""
        self._config, self._workdir, self._membership = config, workdir, membership
        self._writing_stacks = threading.Lock()

    def opened(self, setups: Sequence[Setup], began_as: str | None) -> None:
        """Records and prints what is about to run.

        Args:
          setups: of the phases of the run.
          began_as: transformers' family of the model that the run began with; None: of none.
        """
        setup = setups[0]
        phases = {"phases": [each.phase_to_json() for each in setups]} if self._config.phases else {}
        self.record.update(**setup.to_json(), **phases)
        export = describe_export(self._config.in_phases()[-1].config.model, began_as)
        lines = {"phases": [each.describe_phase() for each in setups]} if phases else {}
        facts = setup.facts() | lines | {"export": export, "workdir": str(self._workdir.path)}
        self.console.opening(self._config.name, facts)

    def fail(self, message: str) -> None:
        """Records that the attempt has failed."""
        self.over.set()
        self.record.update(status="failed", message=message)

    def stalled(self, message: str) -> NoReturn:
        """Ends a process that hangs, with `STALLED`: its record and its stacks say where. Any thread may call it."""
        stacks = self._workdir.stacks(0 if self.peers.count == 1 else "*")
        message = f"{message}; the threads' stacks are in {stacks}; run the same command again to go on"
        leave(
            STALLED,
            self._write_stacks,
            lambda: self.fail(message),
            lambda: print_stacks(f"error: {message}"),
            lambda: self._membership.announce_end(Farewell(STALLED, message)),
        )

    def _on_stop_signal(self, signal: str, receiver: str | None) -> None:
        name = signal if receiver is None else f"{signal} to {receiver}"
        tell = self.console.note if receiver is not None else self.console.answer
        if self.over.is_set() or self.record["status"] != "running":
            tell(f"{name}: the run is ending already")
        elif self.under_way is not None:
            tell(f"{name}: finishing {self.under_way()}, then saving; Ctrl-C (again) leaves at once")
        elif not self._owns_process:
            tell(f"{name}: stopping before the first step, once all is compiled; Ctrl-C (again) leaves at once")
        else:
            message = f"{name} before the first step of this attempt"
            self.record.update(status="preempted", message=message)
            tell(f"{name}: stopped before the first step; run the same command again")
            self._membership.announce_end(Farewell(PREEMPTED, message))
            os._exit(PREEMPTED)  # Python runs no handler while XLA compiles; nothing is lost

    def _on_second_ctrl_c(self) -> None:
        message = "left at once by Ctrl-C after a stop signal, without saving"
        if self.record["status"] == "running":  # otherwise the run's end is recorded already
            self.record.update(status="preempted", message=message)
        self._membership.announce_end(Farewell(INTERRUPTED, message))

    def _record_end(self, farewell: Farewell) -> None:
        """Another process has ended, and this one is about to."""
        if self.record["status"] == "running":
            status = "preempted" if farewell.status in (PREEMPTED, INTERRUPTED) else "failed"
            self.record.update(status=status, message=farewell.message)
        if farewell.status == STALLED:  # the cause may be here, and the other have waited for it
            self._write_stacks()

    def _write_stacks(self) -> None:
        with self._writing_stacks:  # this watchdog and another process may call at the same time
            write_stacks(self._workdir.stacks(self.peers.index))


@contextlib.contextmanager
def attempt(
    config: TrainConfig,
    workdir: Workdir,
    *,
    command: Sequence[str],
    started: float,
    ending: threading.Event | None,
    membership: Membership = ALONE,
    owns_process: bool = True,
) -> Iterator[Attempt]:
    """Heeds stop signals inside, and records how the attempt ended.

    Args:
      config: the experiment.
      workdir: claimed for this process.
      command: the command line, for the record.
      started: `time.perf_counter()` when the process began.
      ending: set once a stop signal can no longer change the run's exit status.
      membership: of this process among those that train together.
      owns_process: whether a stop signal may end the process; otherwise it belongs to the caller.

    Raises:
      TrainingFailed: memory ran out inside, or something called `sys.exit`.
    """
    logging.getLogger("absl").addFilter(_is_no_exception_of_orbax)
    over = ending or threading.Event()
    this = Attempt(config, workdir, command, TimeAccount(started), over, membership, owns_process)
    # Outermost, so that this run still answers signals while its end is being recorded.
    with this.stop:
        try:
            with explained(config, command, this.record):
                yield this
        except SystemExit as exit:  # its status could be 0
            message = f"something other than the trainer called sys.exit({exit.code!r})"
            this.fail(message)
            raise TrainingFailed(message) from exit
        except KeyboardInterrupt:  # a second Ctrl-C, in a process that isn't the run's
            this.over.set()
            this.record.update(status="preempted", message="left at once by Ctrl-C, without saving")
            raise
        except BaseException as error:
            named = isinstance(error, UserMistake | TrainingFailed)
            if not named:
                membership.blame()
            error_type = "" if named else type(error).__name__
            this.fail(": ".join(filter(None, (error_type, str(error)))))
            raise


def _is_no_exception_of_orbax(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that Orbax's threads log. The exceptions are raised as well, and end in one message."""
    return not (record.exc_info and "orbax" in record.pathname)
