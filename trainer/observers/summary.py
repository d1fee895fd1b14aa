"""The closing summary of a run: its results, and where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.config import TrainConfig
from trainer.observers.observer import VALIDATION_LOSS, Ending, Event, Observer
from trainer.observers.plots import draw_losses, draw_mixture
from trainer.observers.record import RunRecord
from trainer.terminal.console import Console
from trainer.terminal.units import format_loss, format_seconds
from trainer.workdir import Workdir


class Summary(Observer):
    """Draws the pictures and prints the summary of an attempt that has ended well.

    Args:
      console: where it is printed.
      config, workdir: of the run.
      record: holds where the time went.
    """

    def __init__(self, console: Console, config: TrainConfig, workdir: Workdir, record: RunRecord):
        self._console, self._config, self._workdir, self._record = console, config, workdir, record

    def observe(self, event: Event) -> None:
        if isinstance(event, Ending):
            self._print(event)

    def _print(self, ending: Ending) -> None:
        title, phases = self._config.name, self._config.in_phases()
        workdir, evaluation, checkpoint = self._workdir, ending.evaluation, ending.checkpoint
        facts: dict[str, str | list[str]] = {}
        if evaluation is not None:
            loss = format_loss(evaluation[VALIDATION_LOSS], evaluation.get("validation_bits_per_byte"))
            facts["validation"] = (
                f"{loss} at step {evaluation['step']}; the corpus's unigram entropy is "
                f"{ending.unigram_nats_per_token:.4f} nats/token"
            )
        facts |= self._describe_goodput()
        facts["time"] = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {format_seconds(seconds)}"
            for name, seconds in self._record["time"].items()
        )
        written = [
            workdir.config,
            workdir.record,
            workdir.metrics,
            workdir.tensorboard,
            checkpoint or workdir.checkpoints,
        ]
        pictures = {
            workdir.loss_picture: lambda picture: draw_losses(
                workdir.metrics,
                picture,
                title=title,
                unigram_nats_per_token=ending.unigram_nats_per_token,
                phases=phases,
            ),
            workdir.mixture_picture: lambda picture: draw_mixture(workdir.metrics, picture, title=title, phases=phases),
        }
        written += [picture for picture, draw in pictures.items() if self._draw(picture, draw)]
        facts["written"] = [f"{path}{'/' if path.is_dir() else ''}" for path in written]
        done = f"step {ending.step} of {self._config.num_steps}"
        if ending.status == "completed":
            how = f"completed: {done}"
        elif checkpoint is not None:
            how = f"stopped and saved at {done}; run the same command again to go on"
        else:
            how = f"stopped at {done}, with nothing to save yet; run the same command again"
        self._console.closing(how, facts)

    def _describe_goodput(self) -> dict[str, str]:
        account = self._record["goodput"]
        if account is None:
            return {}
        seconds = {
            name: format_seconds(account[f"{name}_s"]) for name in ("useful_step", "lost_step", "total", "downtime")
        }
        parts = [f"{seconds['useful_step']} of {seconds['total']} went into steps that the state holds"]
        if account["num_attempts"] > 1:
            parts.append(f"{seconds['lost_step']} into steps that it doesn't")
            parts.append(f"{account['num_attempts']} attempts, with {seconds['downtime']} between them")
        return {"goodput": f"{account['fraction']:.1%}: {', '.join(parts)}"}

    def _draw(self, picture: Path, draw: Callable[[Path], bool]) -> bool:
        """Returns whether a picture could be drawn. A run that ended well doesn't fail if it can't."""
        try:
            return draw(picture)
        except Exception as error:
            self._console.warning(f"{picture} can't be drawn: {type(error).__name__}: {error}")
            return False
