"""Weights & Biases (the `wandb` extra): TensorBoard's values, in a W&B run for each attempt.

The attempts at one run share a group, which is named for the workdir. W&B's own files lie in the workdir's `wandb/`.
Once a run is under way, W&B can't end it: where its service fails, the run is warned, and goes on without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.compile.history import Recompile, report_scalars
from trainer.compile.stages import CompileReport
from trainer.config import TrainConfig
from trainer.config.file import config_to_json
from trainer.errors import TrainingFailed, UserMistake
from trainer.observers.observer import (
    Ending,
    Evaluated,
    EvaluatedAtLength,
    Event,
    LogEntry,
    LogWindow,
    Observer,
    PhaseBegun,
    Saved,
    Start,
    curves_of,
)
from trainer.terminal.console import Console

# Seconds that a run waits in the end until what it has logged is with W&B.
_UPLOADED_WITHIN_S = 60.0


def require_wandb(project: str) -> None:
    """Raises UserMistake if the `wandb` package isn't installed."""
    if importlib.util.find_spec("wandb") is None:
        raise UserMistake(
            f"wandb.project={project!r} needs the wandb extra: `pip install -e '.[wandb]'` in the clone, "
            "or leave wandb.project at None"
        )


class WeightsAndBiases(Observer):
    """Logs an attempt to Weights & Biases.

    Args:
      config: the experiment, with `wandb.project`.
      workdir: the run's folder.
      console: warned when W&B's service fails.
      sequence_lengths: of each phase; empty: the run has none.

    Raises:
      TrainingFailed: at the start, that Weights & Biases can't be reached.
    """

    def __init__(self, config: TrainConfig, workdir: Path, console: Console, sequence_lengths: Sequence[int] = ()):
        self._config, self._workdir, self._console = config, workdir, console
        self._sequence_lengths = sequence_lengths
        self._run: Any = None

    def observe(self, event: Event) -> None:
        match event:
            case Start():
                self._begin(event)
            case Recompile():
                self._summarise_compilation([event.report])
            case PhaseBegun():
                self._summarise_compilation(event.reports)
            case LogWindow():
                for entry in event.entries:
                    self._log(entry)
            case Evaluated():
                self._log(event.entry)
            case EvaluatedAtLength():
                self._call(lambda run: self._log_at_length(run, event))
            case Saved(step, path):
                self._summarise({"checkpoint": str(path), "checkpoint_step": step})
            case Ending():
                self._summarise({"status": event.status})
                self._call(lambda run: run.finish(exit_code=0))
                self._run = None

    def _begin(self, start: Start) -> None:
        import wandb

        settings = self._config.wandb
        try:
            self._run = wandb.init(
                project=settings.project,
                name=self._config.name,
                group=self._workdir.name,
                dir=self._workdir,
                mode=settings.mode,
                config=config_to_json(self._config),
                # Only our console prints.
                settings=wandb.Settings(silent=True, console="off", finish_timeout=_UPLOADED_WITHIN_S),
            )
        except wandb.Error as error:
            raise TrainingFailed(
                f"Weights & Biases can't be reached: {error}; run `wandb login`, set wandb.mode to offline, or "
                "wandb.project to None"
            ) from error
        self._summarise_compilation(start.reports)

    def close(self) -> None:
        self._call(lambda run: run.finish(exit_code=1))  # there is a run only if the attempt hasn't ended well
        self._run = None

    def _summarise_compilation(self, reports: Sequence[CompileReport]) -> None:
        for report in reports:
            self._summarise({f"compile/{report.name}": report_scalars(report)})

    def _summarise(self, values: dict[str, Any]) -> None:
        self._call(lambda run: run.summary.update(values))

    def _log(self, entry: LogEntry) -> None:
        values = curves_of(entry, self._sequence_lengths)
        self._call(lambda run: run.log(values, step=entry["step"]))

    @staticmethod
    def _log_at_length(run: Any, event: EvaluatedAtLength) -> None:
        import wandb

        pictures = {f"evaluation/{picture.stem}": wandb.Image(str(picture)) for picture in event.pictures}
        run.log({**event.values, **pictures}, step=event.step)

    def _call(self, act: Callable[[Any], None]) -> None:
        """Does something with W&B's run while there is one. If that fails, there is none any more."""
        if self._run is None:
            return
        try:
            act(self._run)
        except Exception as error:  # its service may be gone, whose errors are of many kinds
            self._run = None
            self._console.warning(
                f"Weights & Biases failed ({type(error).__name__}: {error}); the run goes on without it. What it has "
                f"heard is in {self._workdir / 'wandb'}, for `wandb sync`"
            )
