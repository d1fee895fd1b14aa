"""Searches for the smallest change of one config field with which a training step fits in the devices' memory.

Each remedy (a field set to another value) is compiled. The fields are tried in the order of what they cost a run, the
least harmful first. The first field that can make the step fit is taken, with the least value that does:

1. `model.remat`: a policy that recomputes more, or waits for the host's memory. Takes time, changes no number.
2. `loss.chunk_size`: halved, down to 128. Smaller matmuls.
3. `optimizer.offload_moments`: moments in the host's memory. Each update copies them to the device and back.
4. `gradient_accumulation`: more micro-batches to a step. Smaller matmuls throughout.
5. `mesh.fsdp`, 6. `mesh.context`, 7. `mesh.tensor`: more of the devices that there are, in the order of what they make
   the devices send.

The least value of a field is tried first: it often suffices. The greatest is tried next: if that doesn't fit either,
the field is given up. Then the others are tried from the least up, to the first that fits.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from layers.remat import REMAT_POLICIES, offloads
from trainer.compile.step_profile import StepProfile
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed, UserMistake

_SMALLEST_CHUNK = 128


@dataclass(frozen=True)
class Remedy:
    """One field of the config set to another value, which makes the step smaller."""

    field: str
    value: Any

    @property
    def arguments(self) -> tuple[str, ...]:
        """As the command line takes it."""
        return (f"--{self.field.replace('_', '-')}", str(self.value))

    def __str__(self) -> str:
        return " ".join(self.arguments)

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The changed config.

        Raises:
          ValueError: it is none that can be run.
        """
        section, _, name = self.field.rpartition(".")
        value = dataclasses.replace(getattr(config, section), **{name: self.value}) if section else self.value
        changed = dataclasses.replace(config, **{section or name: value})
        changed.check_model()  # which a config with init_from leaves to whoever puts its model in
        return changed


@dataclass(frozen=True)
class Changes:
    """Several fields of the config set to other values."""

    remedies: tuple[Remedy, ...] = ()

    def also(self, remedy: Remedy) -> Changes:
        """These and another one, in the place of one of the same field."""
        return Changes((*(each for each in self.remedies if each.field != remedy.field), remedy))

    @property
    def arguments(self) -> tuple[str, ...]:
        """As the command line takes them."""
        return tuple(argument for remedy in self.remedies for argument in remedy.arguments)

    def __str__(self) -> str:
        return " ".join(self.arguments)

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The changed config.

        Raises:
          ValueError: it is none that can be run.
        """
        for remedy in self.remedies:
            config = remedy.apply(config)
        return config


@dataclass(frozen=True)
class Try:
    """A change, and what compiling with it gave."""

    change: Remedy | Changes
    profile: StepProfile | None
    problem: str | None = None
    """Why there is no profile."""

    @property
    def fits(self) -> bool:
        return self.profile is not None and self.profile.fit is not None and self.profile.fit.fits is True

    @property
    def needed(self) -> float:
        """Bytes on each device."""
        return math.inf if self.profile is None or self.profile.fit is None else self.profile.fit.needed


@dataclass(frozen=True)
class SearchResult:
    """The changes that a search has tried."""

    tries: tuple[Try, ...]
    """In the order of trying."""
    is_complete: bool
    """False: the time ran out before every remedy that might fit, or be smaller, was tried."""

    @property
    def found(self) -> Try | None:
        """The smallest remedy that fits. It is the last that does: after one that fits only smaller ones are tried."""
        return next((attempt for attempt in reversed(self.tries) if attempt.fits), None)

    @property
    def closest(self) -> Try | None:
        """The remedy that needs the least memory, for when nothing fits."""
        compiled = [attempt for attempt in self.tries if attempt.profile is not None]
        return min(compiled, key=lambda attempt: attempt.needed, default=None)


class OutOfTime(Exception):
    """Ends a search whose time is up."""


def search_remedy(
    config: TrainConfig,
    num_devices: int,
    compile_with: Callable[[Remedy], StepProfile],
    *,
    seconds: float,
    can_offload: bool = True,
    on_try: Callable[[Try], None],
) -> SearchResult:
    """Looks for the smallest remedy.

    Args:
      config: the experiment whose step doesn't fit.
      num_devices: devices that there are.
      compile_with: compiles the config with a remedy.
      seconds: no compilation begins after these.
      can_offload: whether the host has memory that isn't the devices' own.
      on_try: called with each try.
    """
    deadline = time.monotonic() + seconds
    tries: list[Try] = []

    def attempt(change: Remedy) -> Try:
        if time.monotonic() >= deadline:
            raise OutOfTime
        try:
            tried = Try(change, compile_with(change))
        except (UserMistake, TrainingFailed) as error:
            tried = Try(change, None, str(error))
        tries.append(tried)
        on_try(tried)
        return tried

    try:
        for changes in single_remedies(config, num_devices, can_offload=can_offload):
            if _narrow_down(changes, attempt):
                break
    except OutOfTime:
        return SearchResult(tuple(tries), is_complete=False)
    return SearchResult(tuple(tries), is_complete=True)


def _narrow_down(changes: Sequence[Remedy], attempt: Callable[[Remedy], Try]) -> bool:
    """Tries the values of one field until the least that fits has been tried. Returns whether any fits."""
    if attempt(changes[0]).fits:
        return True
    if len(changes) == 1 or not attempt(changes[-1]).fits:
        return False
    # Not by bisection: libtpu refuses within seconds what doesn't fit, but takes far longer to compile what does.
    for change in changes[1:-1]:
        if attempt(change).fits:
            break
    return True


def single_remedies(config: TrainConfig, num_devices: int, *, can_offload: bool = True) -> list[list[Remedy]]:
    """Every remedy worth trying: the fields in the order of harm, each from its least value to its greatest.

    Args:
      config: the experiment whose step doesn't fit.
      num_devices: devices that there are.
      can_offload: whether the host has memory that isn't the devices' own.
    """
    fields = [
        [Remedy("model.remat", policy) for policy in _stricter(config.model.remat, can_offload)],
        [Remedy("loss.chunk_size", size) for size in _halvings(_tokens_at_once(config))],
        [Remedy("optimizer.offload_moments", True)] if can_offload and not config.optimizer.offload_moments else [],
        [
            Remedy("gradient_accumulation", count)
            for count in range(config.gradient_accumulation + 1, config.batch_size + 1)
        ],
        *(
            [Remedy(f"mesh.{axis}", size) for size in _larger(config, axis, num_devices)]
            for axis in ("fsdp", "context", "tensor")
        ),
    ]
    valid = [[change for change in changes if _is_valid(change, config)] for changes in fields]
    return [changes for changes in valid if changes]


def _stricter(policy: str, can_offload: bool) -> list[str]:
    """The named policies that keep less on the device; for one spelled out, the one that keeps least."""
    names = [name for name in REMAT_POLICIES if can_offload or not offloads(name)]
    return names[names.index(policy) + 1 :] if policy in names else names[-1:]


def _tokens_at_once(config: TrainConfig) -> int:
    """Tokens whose logits exist at one time on a device."""
    mesh = config.mesh
    micro_batch = config.batch_size // config.gradient_accumulation // (mesh.data * mesh.fsdp)
    return min(config.loss.chunk_size, micro_batch * config.sequence_length // mesh.context)


def _halvings(size: int) -> list[int]:
    sizes = []
    while size // 2 >= _SMALLEST_CHUNK:
        size //= 2
        sizes.append(size)
    return sizes


def _larger(config: TrainConfig, axis: str, num_devices: int) -> list[int]:
    """Larger sizes of a mesh axis. The mesh then takes a divisor of the devices, which JAX requires on TPUs."""
    size = getattr(config.mesh, axis)
    used = math.prod(dataclasses.asdict(config.mesh).values())
    return [size * times for times in range(2, num_devices // used + 1) if num_devices % (used * times) == 0]


def _is_valid(change: Remedy, config: TrainConfig) -> bool:
    try:
        change.apply(config)
    except ValueError:
        return False
    return True
