"""The events of a run, and the observers that hear of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.compile.history import Recompile
from trainer.compile.stages import CompileReport

VALIDATION_LOSS = "validation_nats_per_token"
VALIDATION_DIGEST = "validation_digest"
"""Tells on which sequences, and how, an evaluation measured: losses with different ones don't compare."""
MIXTURE = "mixture"
"""Begins the names of the shares of a window's tokens: `mixture/SOURCE`, and by the least tokens of the documents
`mixture_lengths/1024`."""
NOT_DRAWN = ("step", "time", "phase", VALIDATION_DIGEST)
"""The values of an entry that are no curve. The curve of a phase is its sequence length."""
PHASE_LENGTH = "phase/sequence_length"
"""The curve that shows where a phase begins."""

LogEntry = Mapping[str, Any]
"""A log entry of a step: `step`, `time` (Unix seconds), and numbers by name; None for a number that isn't finite. In a
run with phases `phase` is among them, from 1. An evaluation's has `VALIDATION_DIGEST`, too, a text."""


def make_entry(step: int, values: Mapping[str, float | None]) -> dict[str, Any]:
    """An entry with the current time.

    >>> entry = make_entry(3, {"loss": float("nan"), "num_targets": 7})
    >>> entry["step"], entry["loss"], entry["num_targets"]
    (3, None, 7)
    """
    finite = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
    return {"step": step, **finite, "time": round(time.time(), 3)}


def curves_of(entry: LogEntry, sequence_lengths: Sequence[int]) -> dict[str, float]:
    """The values of an entry that curves show, by name.

    Args:
      entry: the entry.
      sequence_lengths: of each phase; empty: the run has none.

    >>> curves_of({"step": 3, "loss": 2.5, "grad_norm": None, "phase": 2, "time": 1.0}, [32, 64])
    {'loss': 2.5, 'phase/sequence_length': 64}
    """
    values = {name: value for name, value in entry.items() if name not in NOT_DRAWN and value is not None}
    # An evaluation is at a step whose point is there already.
    of_step = sequence_lengths and "phase" in entry and VALIDATION_DIGEST not in entry
    return values | ({PHASE_LENGTH: sequence_lengths[entry["phase"] - 1]} if of_step else {})


@dataclass(frozen=True)
class Start:
    """An attempt at a run is about to make its first step."""

    step: int
    """Steps done before; 0 at the beginning of a run."""
    num_steps: int
    """Steps of the whole run."""
    entries: Iterable[LogEntry]
    """The entries of earlier attempts up to that step. They can be iterated more than once."""
    reports: Sequence[CompileReport]
    """The programs compiled for this attempt."""


@dataclass(frozen=True)
class PhaseBegun:
    """A later phase of the run is about to make its first step."""

    step: int
    """Steps done before."""
    description: str
    reports: Sequence[CompileReport]
    """Its programs, which were compiled beside the steps before."""


@dataclass(frozen=True)
class LogWindow:
    """The steps between two log lines. The device was idle at the beginning and at the end."""

    step: int
    """The last step."""
    num_steps: int
    """Steps of the whole run."""
    loss: float
    """Of the last step, in nats per target."""
    step_s: float
    """Mean seconds of a step."""
    data_wait_s: float
    """Seconds of the window in which the host waited for data."""
    tokens_per_s: float
    """Of documents, whatever their targets' weights: padding doesn't count."""
    mfu_causal: float | None
    """Model FLOPs utilisation; None: the devices' peak is unknown."""
    left_s: float
    """Expected seconds to the last step."""
    entries: Sequence[LogEntry] = ()
    """One for each step."""
    mixture: Mapping[str, Any] | None = None
    """The tokens drawn so far from each source, for the record; None: the data is no mixture."""
    num_skipped: int = 0
    """Updates that were skipped in the whole run."""
    is_amid_skipped: bool = False
    """The last update was skipped."""
    skipped: str | None = None
    """Tells of the updates that were skipped in this window; None: none was."""
    failure: str | None = None
    """Names the step at which too many updates in a row had been skipped, which ends the run; None: there is none."""


@dataclass(frozen=True)
class Evaluation:
    """Loss over all validation targets."""

    nats_per_token: float
    """Mean negative log-likelihood of a target; targets count by their weights."""
    bits_per_byte: float | None
    """Bits per byte of text, which don't depend on the tokenizer; None: the text isn't known, or the data is trees, of
    whose text only a part is predicted."""
    num_targets: int
    """Tokens predicted: targets whose weight isn't 0."""
    nats_per_token_by_source: Mapping[str, float] = field(default_factory=dict)
    """The same mean for each source of a mixture."""


@dataclass(frozen=True)
class Evaluated:
    """The validation loss after a step."""

    step: int
    evaluation: Evaluation
    entry: LogEntry

    @classmethod
    def now(cls, step: int, evaluation: Evaluation, digest: str, phase: int | None = None) -> Evaluated:
        """A loss that was just measured, on the sequences of `digest`, in a phase of the run, from 1."""
        losses = {VALIDATION_LOSS: evaluation.nats_per_token, "validation_bits_per_byte": evaluation.bits_per_byte}
        losses |= {f"{VALIDATION_LOSS}/{name}": loss for name, loss in evaluation.nats_per_token_by_source.items()}
        in_phase = {} if phase is None else {"phase": phase}
        return cls(step, evaluation, make_entry(step, losses | in_phase) | {VALIDATION_DIGEST: digest})


@dataclass(frozen=True)
class EvaluatedAtLength:
    """Retrieval and losses at the lengths that a run is evaluated at."""

    step: int
    table: str
    """Of the results, beside those of the run's first evaluation."""
    values: Mapping[str, float]
    """By the name of their curve."""
    pictures: Sequence[Path]
    """PNG files."""


@dataclass(frozen=True)
class Ending:
    """An attempt has ended well."""

    status: Literal["completed", "preempted"]
    step: int
    """Steps done."""
    checkpoint: Path | None
    """The newest checkpoint; None: there was nothing to save."""
    evaluation: LogEntry | None
    """The run's newest validation losses."""
    unigram_nats_per_token: float
    """Entropy of the corpus's single tokens, for comparison."""
    memory: Mapping[str, int | None]
    """Peak bytes, of the host and a device."""


@dataclass(frozen=True)
class Advanced:
    """The device has finished the steps up to this one."""

    step: int


@dataclass(frozen=True)
class Sampled:
    """The model has continued a prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint lies on the disk, whole."""

    step: int
    path: Path


Event = Start | PhaseBegun | Advanced | Recompile | LogWindow | Evaluated | EvaluatedAtLength | Sampled | Saved | Ending
"""Everything that observers hear of: `Start` first, `Ending` last, where the attempt ends well."""


class Observer:
    """Hears of the events of a run. By default it does nothing."""

    def observe(self, event: Event) -> None:
        """Takes note of an event; most observers care for some kinds of events."""

    def close(self) -> None:
        """Nothing follows, however the attempt has ended."""


class Observers(Observer):
    """Passes each event on to several observers, in order."""

    def __init__(self, *observers: Observer):
        self._observers = observers

    def observe(self, event: Event) -> None:
        for observer in self._observers:
            observer.observe(event)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()
