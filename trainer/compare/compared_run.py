"""A run as it is compared: what its workdir tells, and its losses over steps, tokens and seconds."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int64

from trainer.config import TrainConfig
from trainer.config.file import load_saved_config
from trainer.config.train_config import RunPhase
from trainer.errors import UserMistake
from trainer.evaluate.results import FILE_NAME, Line, read_lines
from trainer.observers.goodput import plausible_seconds
from trainer.observers.metrics import read_entries
from trainer.observers.observer import VALIDATION_DIGEST, VALIDATION_LOSS
from trainer.observers.record import read_record
from trainer.observers.times import StepTimes
from trainer.workdir import Workdir

# N logged steps, V evaluations
Axis = Literal["steps", "tokens", "seconds"]
AXES: tuple[Axis, ...] = get_args(Axis)


class Measured(NamedTuple):
    """A number of a run. It compares with that of another run which has the same `measured_on`."""

    value: float
    """NaN: it wasn't finite."""
    measured_on: Hashable | None = ""
    """None: unknown, so that it compares with no other."""

    def compares_with(self, other: Measured) -> bool:
        """True if a difference means something."""
        return self.measured_on is not None and self.measured_on == other.measured_on


@dataclass(frozen=True)
class Curves:
    """The losses of a run, in nats per token, against what was done up to them."""

    done: Mapping[Axis, Float[np.ndarray, " N"]]
    """After each logged step, from the run's beginning. Tokens are those trained on; seconds are those of steps."""
    training: Float[np.ndarray, " N"]
    """NaN where a loss wasn't finite."""
    validated: Int64[np.ndarray, " V"]
    """Steps, rising."""
    validation: Float[np.ndarray, " V"]
    """NaN where a loss wasn't finite."""
    digests: tuple[str | None, ...]
    """Of the sequences of each evaluation; None: unknown."""

    def at_steps(self, axis: Axis, steps: Sequence[int] | Int64[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
        """The place of steps on an axis."""
        logged, places = (np.insert(self.done[each], 0, 0.0) for each in ("steps", axis))
        return np.interp(steps, logged, places)

    def smoothed(self, axis: Axis, width: float) -> Float[np.ndarray, " N"]:
        """The training loss as a mean of the finite ones within (x - width, x]; NaN where there is none.

        Args:
          axis: that the width is on.
          width: of the window. The step itself is always within it.
        """
        x, is_finite = self.done[axis], np.isfinite(self.training)
        sums = np.cumsum(np.append(0.0, np.where(is_finite, self.training, 0.0)))
        counts = np.cumsum(np.append(0, is_finite))
        last = np.arange(1, len(x) + 1)
        first = np.minimum(np.searchsorted(x, x - width, side="right"), last - 1)
        num = counts[last] - counts[first]
        return np.where(num > 0, (sums[last] - sums[first]) / np.maximum(num, 1), np.nan)

    def training_at(self, axis: Axis, x: float, width: float) -> Measured | None:
        """The smoothed training loss at a place; None: it is before the first logged step or after the last."""
        places = self.done[axis]
        if not len(places) or not places[0] <= x <= places[-1]:
            return None
        return Measured(float(np.interp(x, places, self.smoothed(axis, width))))

    def validation_at(self, axis: Axis, x: float) -> Measured | None:
        """The validation loss at a place; None: it isn't between two evaluations of the same sequences."""
        places = self.at_steps(axis, self.validated)
        after = int(np.searchsorted(places, x))
        if after < len(places) and places[after] == x:
            return Measured(float(self.validation[after]), self.digests[after])
        if not 0 < after < len(places) or self.digests[after - 1] != self.digests[after]:
            return None
        return Measured(float(np.interp(x, places, self.validation)), self.digests[after])


@dataclass(frozen=True)
class ComparedRun:
    """A run that may be under way. Its files were read once."""

    path: Path
    name: str
    """The workdir's name, or its path where another run has the same name."""
    config: TrainConfig
    phases: tuple[RunPhase, ...]
    record: Mapping[str, Any]
    """Empty: there is none yet."""
    curves: Curves
    speeds: tuple[Mapping[str, float | int | None], ...]
    """Of each phase, as the record's `steps`, over all attempts."""
    evaluations: tuple[Line, ...]
    """At length, of the newest step."""


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Reads workdirs, without writing to them.

    Raises:
      UserMistake: a folder is no workdir, is given twice, or its config or record is damaged.
    """
    given: dict[Path, Path] = {}
    for path in paths:
        if (resolved := path.resolve()) in given:
            raise UserMistake(
                f"a run is given twice, as {given[resolved]} and as {path}; it can't be compared with itself, leave "
                "one out"
            )
        given[resolved] = path
    num_of_name = Counter(resolved.name for resolved in given)
    names = (resolved.name if num_of_name[resolved.name] == 1 else str(path) for resolved, path in given.items())
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def shared_end(runs: Sequence[ComparedRun], axis: Axis) -> float:
    """How far all runs have come; 0: one has logged no step."""
    return min((float(done[-1]) if len(done := run.curves.done[axis]) else 0.0) for run in runs)


def _read_run(path: Path, name: str) -> ComparedRun:
    workdir = Workdir(path)
    if not workdir.config.is_file():
        raise UserMistake(
            f"{path} is no workdir: it {'holds no config.json' if path.is_dir() else 'does not exist'}; expected the "
            "folder that a run of `python -m trainer` wrote to"
        )
    config, file = load_saved_config(workdir.config), workdir.config
    try:
        phases = config.in_phases()
        file = workdir.record
        record = read_record(file) if file.exists() else {}
        file = workdir.metrics
        curves, speeds = _read_metrics(file, phases)
        file = path / FILE_NAME
        lines = read_lines(file)
    except (OSError, ValueError) as error:
        raise UserMistake(f"{file} can't be read: {error}; mend it, or leave its run out") from error
    newest = max((line.step for line in lines), default=0)
    return ComparedRun(
        path, name, config, phases, record, curves, speeds, tuple(line for line in lines if line.step == newest)
    )


def _read_metrics(
    metrics: Path, phases: Sequence[RunPhase]
) -> tuple[Curves, tuple[Mapping[str, float | int | None], ...]]:
    """The losses of a run, and the speed of each phase."""
    steps: list[int] = []
    training: list[float] = []
    tokens: list[int] = []
    seconds: list[float] = []
    evaluations: dict[int, tuple[float, str | None]] = {}
    times = [StepTimes() for _ in phases]
    begins = [phase.first_step for phase in phases]
    for entry in read_entries(metrics):
        step = entry["step"]
        if VALIDATION_LOSS in entry:  # of two at one step, a later attempt made the second
            evaluations[step] = (_or_nan(entry[VALIDATION_LOSS]), entry.get(VALIDATION_DIGEST))
        if "loss" not in entry or step <= (steps[-1] if steps else 0):
            continue
        steps.append(step)
        training.append(_or_nan(entry["loss"]))
        # Logs before 2026-11-29 have targets alone.
        tokens.append(entry.get("num_tokens", entry.get("num_targets")) or 0)
        if entry.get("step_s") is None:
            continue
        # The last step of a window tells the mean of them all.
        num_steps, step_s = len(steps) - len(seconds), plausible_seconds(entry["step_s"])
        num_tokens = sum(tokens[len(seconds) :])
        seconds += [step_s] * num_steps
        causal, noncausal = entry.get("mfu_causal"), entry.get("mfu_noncausal")
        mfu = None if causal is None or noncausal is None else (causal, noncausal)
        times[bisect.bisect_left(begins, step) - 1].add_window(num_steps, num_steps * step_s, num_tokens, mfu)
    num = len(seconds)  # the steps of a window without an end have taken nobody knows how long
    done = {"steps": steps[:num], "tokens": np.cumsum(tokens[:num]), "seconds": np.cumsum(seconds)}
    validated = sorted(step for step in evaluations if num and step <= steps[num - 1])
    curves = Curves(
        {axis: np.asarray(done[axis], np.float64) for axis in AXES},
        np.asarray(training[:num], np.float64),
        np.asarray(validated, np.int64),
        np.asarray([evaluations[step][0] for step in validated], np.float64),
        tuple(evaluations[step][1] for step in validated),
    )
    return curves, tuple(each.to_json() for each in times)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
