"""Prints a line on the console for each event of a run."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.compile.history import Recompile
from trainer.compile.stages import CompileReport, format_stages
from trainer.observers.observer import (
    Evaluated,
    EvaluatedAtLength,
    Event,
    LogWindow,
    Observer,
    PhaseBegun,
    Sampled,
    Start,
)
from trainer.terminal.console import Console
from trainer.terminal.units import format_bytes, format_loss, format_seconds


class ConsoleLines(Observer):
    """Prints a run.

    Args:
      console: where to.
    """

    def __init__(self, console: Console):
        self._console = console

    def observe(self, event: Event) -> None:
        match event:
            case Start():
                for line in describe_reports(event.reports):
                    self._console.note(line)
            case PhaseBegun():
                for line in (event.description, *describe_reports(event.reports)):
                    self._console.note(line)
            case Recompile():
                self._console.warning(str(event))
            case LogWindow():
                self._print_window(event)
            case Evaluated(step, evaluation):
                loss = format_loss(evaluation.nats_per_token, evaluation.bits_per_byte)
                sources = "".join(f", {name} {each:.4f}" for name, each in evaluation.nats_per_token_by_source.items())
                self._console.note(f"step {step}: validation {loss}{sources}")
            case EvaluatedAtLength():
                for line in event.table.splitlines():
                    self._console.note(line)
            case Sampled(step, prompt, text):
                self._console.note(f"step {step}: sample: {prompt}▸{text}")

    def _print_window(self, window: LogWindow) -> None:
        if window.failure is not None:
            return  # the message that ends the run tells it
        if window.skipped is not None:
            self._console.warning(window.skipped)
        mfu = "" if window.mfu_causal is None else f"MFU {window.mfu_causal:.1%}  "
        self._console.note(
            f"step {window.step}/{window.num_steps}  loss {window.loss:.4f}  {window.tokens_per_s:,.0f} tokens/s  "
            f"{format_seconds(window.step_s)}/step  {mfu}data wait {format_seconds(window.data_wait_s)}  "
            f"{format_seconds(window.left_s)} left"
        )


def describe_reports(reports: Sequence[CompileReport]) -> list[str]:
    """A line for each program's compilation, and one for the training step's memory."""
    lines = [f"compile {report.name}: {format_stages(report)}" for report in reports]
    memory = next((report.memory for report in reports if report.name == "train_step"), None)
    if memory is not None:
        lines.append(
            f"memory of a step, per device: {format_bytes(memory.peak)} at the peak: "
            f"state and batch {format_bytes(memory.arguments)}, temporaries {format_bytes(memory.temporaries)}, "
            f"program {format_bytes(memory.code)}"
            + (f"; {format_bytes(memory.host)} in the host's memory" if memory.host else "")
        )
    return lines
