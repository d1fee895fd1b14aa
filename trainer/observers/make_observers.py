"""Makes the one list of a run's observers."""

from __future__ import annotations

from trainer.compile.history import CompileHistory
from trainer.config import TrainConfig
from trainer.observers.console_lines import ConsoleLines
from trainer.observers.metrics import MetricsFile
from trainer.observers.observer import Observer, Observers
from trainer.observers.record import RecordUpdates, RunRecord
from trainer.observers.summary import Summary
from trainer.observers.tensorboard import TensorBoard
from trainer.observers.times import StepTimes
from trainer.observers.wandb import WeightsAndBiases
from trainer.terminal.console import Console
from trainer.workdir import Workdir


def make_observers(
    config: TrainConfig,
    workdir: Workdir,
    console: Console,
    record: RunRecord,
    history: CompileHistory,
    times: StepTimes,
) -> Observers:
    """All observers of a run.

    Args:
      config: the experiment. It says whether Weights & Biases is used.
      workdir: where the logs lie.
      console, record: of the run.
      history: of what the run compiles, for the record.
      times: of its steps, for the record.

    Raises:
      UserMistake: what the config asks for isn't installed.
    """
    lengths = [phase.config.sequence_length for phase in config.in_phases()] if config.phases else []
    # The metrics come before the record: a record with `compile` tells the next attempt that the log is this attempt's.
    observers: list[Observer] = [
        MetricsFile(workdir.metrics, console),
        TensorBoard(workdir.tensorboard, console, lengths),
        RecordUpdates(record, history, times),
    ]
    if config.wandb.project is not None:  # after the record: it may wait for the network in the end
        observers.append(WeightsAndBiases(config, workdir.path, console, lengths))
    return Observers(*observers, ConsoleLines(console), Summary(console, config, workdir, record))
