"""Resumes a run from a checkpoint: at its place in the data, with a config that may have changed since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoints.base import read_base, require_same_base
from trainer.checkpoints.folder import Metadata
from trainer.checkpoints.training_state import Checkpoints, Restored
from trainer.config import TrainConfig
from trainer.config.resume_changes import ConfigChange, ConfigHistory, refuse_other_phases, refuse_other_run
from trainer.loop.setup import Setup
from trainer.saved_run import held_history
from trainer.step.frozen import join_frozen, split_frozen, without_adapters
from trainer.step.optimizer import make_schedule
from trainer.step.train_step import TrainState
from trainer.terminal.console import Console
from trainer.workdir import Workdir


class Resumed(NamedTuple):
    """The place that a run goes on from: a checkpoint, or its own beginning."""

    step: int
    """0 at the beginning."""
    phase: int
    """The index of the phase that made the step. It may be over."""
    state: Any
    """None at the beginning: it has yet to be initialised."""
    config_history: ConfigHistory
    origin: dict[str, Any] | None
    """The record's entry about the checkpoint."""


def restore(
    checkpoints: Checkpoints, setups: Sequence[Setup], workdir: Workdir, console: Console, base: str | None
) -> Resumed:
    """Reads the newest whole checkpoint, if there has ever been one, and tells on the console how the run goes on.

    `base`: digest of the folder that holds what adapters leave frozen, which is read again.

    Raises:
      UserMistake, TrainingFailed: as `Checkpoints.restore_newest`, `refuse_other_checkpoint` and `go_on_from`.
    """
    run = setups[0].run

    def phase_of(step: int) -> int:
        return run.phase_at(step).index

    def refuse(path: Path, metadata: Metadata) -> None:
        refuse_other_checkpoint(path, metadata, run)
        require_same_base(run, base, path, metadata.base)

    def saved_state(step: int) -> TrainState:
        state = setups[phase_of(step)].functions.abstract_state
        return state._replace(params=split_frozen(run.lora, state.params)[0])

    restored = checkpoints.restore_newest(saved_state, refuse)
    if restored is None:
        return Resumed(0, 0, None, ConfigHistory(run), None)
    setup = setups[phase_of(restored.step)]
    for damaged in restored.damaged:
        console.note(f"{damaged}; it is kept, and the run goes on from the one before")
    history, changes = go_on_from(restored, setup, workdir)
    done = "; no step is left to make" if restored.step >= run.num_steps else ""
    console.note(f"resumed at step {restored.step}/{run.num_steps} from {workdir.checkpoints}{done}")
    for change in changes:
        console.note(change)
    passed_over = {str(item.path): item.reason for item in restored.damaged}
    origin = {"step": restored.step, "passed_over": passed_over}
    state = restored.state
    if base is not None:
        params = read_base(setup.config, without_adapters(setup.functions.state_shardings.params))
        state = state._replace(params=join_frozen(state.params, split_frozen(run.lora, params)[1]))
    return Resumed(restored.step, setup.phase.index, state, history, origin)


def refuse_other_checkpoint(path: Path, metadata: Metadata, run: TrainConfig) -> None:
    """Refuses a checkpoint that a run can't go on from.

    Args:
      path: the checkpoint.
      metadata: of the checkpoint.
      run: the config of the steps to come.

    Raises:
      UserMistake: the checkpoint is of another run, or of other phases.
      TrainingFailed: the checkpoint holds its config in an unknown form.
    """
    held = held_history(path, metadata.config_history).config
    refuse_other_run(held, run, f"checkpoint {path}")
    refuse_other_phases(held, run, metadata.step)


def go_on_from(restored: Restored, setup: Setup, workdir: Workdir) -> tuple[ConfigHistory, list[str]]:
    """Moves the data to a checkpoint's place, and compares the checkpoint's config with the run's.

    Args:
      restored: the checkpoint.
      setup: of the steps to come.
      workdir: its config.json is overwritten with the new config.

    Returns:
      The config with all its changes so far, and lines that tell what differs from now on.

    Raises:
      UserMistake: the run can't go on with this data.
      TrainingFailed: the checkpoint holds its config in an unknown form.
    """
    before = held_history(restored.path, restored.config_history)
    of_data = setup.batches.set_state(restored.data_state, allow_changed=setup.config.data.allow_changed)
    history = before.resumed(restored.step, setup.run)
    new = history.changes[len(before.changes) :]
    lines = [*map(str, new), *_consequences(new, before, history, restored.step), *of_data]
    try:
        workdir.write_config(setup.run)
    except OSError as error:
        lines.append(
            f"{workdir.config} can't be written: {error.strerror}; it stays as it was, the checkpoints tell it"
        )
    return history, lines


def _consequences(new: Sequence[ConfigChange], before: ConfigHistory, after: ConfigHistory, step: int) -> list[str]:
    """Lines about consequences of the changes that aren't obvious."""
    lines = []
    if any(change.consequence == "schedule" for change in new) and step < after.config.num_steps:
        phases = [config.phase_at(step + 1) for config in (before.config, after.config)]
        rates = [
            float(make_schedule(phase.config.optimizer, phase.config.num_steps, phase.schedule_from)(step))
            for phase in phases
        ]
        lines.append(
            f"the learning rate follows the new schedule of {phases[1].config.num_steps} steps as if it had been so "
            f"from the start: {rates[1]:.3g} in step {step + 1}, {rates[0]:.3g} by the one before"
        )
    return lines
