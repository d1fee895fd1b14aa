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

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from layers.remat import REMAT_POLICIES, offloads
from trainer.compile.changes import NO_CHANGES, Changes
from trainer.compile.step_profile import StepProfile
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed, UserMistake

_SMALLEST_CHUNK = 128


@dataclass(frozen=True)
class Try:
    """Changes, and what compiling with them gave."""

    changes: Changes
    profile: StepProfile | None
    problem: str | None = None
    """Why there is no profile."""

    @property
    def fits(self) -> bool:
        return self.profile is not None and self.profile.fit is not None and self.profile.fit.fits is True


class OutOfTime(Exception):
    """Ends a search whose time is up."""


class Search:
    """Compiles a config with changes, each once, until the time is up.

    Args:
      config: the experiment; of a run with phases, that of one of them.
      compile_with: compiles the config with changes.
      num_devices: devices that there are.
      can_offload: whether the host has memory that isn't the devices' own.
      seconds: no compilation begins after these.
      on_try: called with each try.
      base: no changes yet. It tells the phase that they are for.
    """

    def __init__(
        self,
        config: TrainConfig,
        compile_with: Callable[[Changes], StepProfile],
        *,
        num_devices: int,
        can_offload: bool = True,
        seconds: float,
        on_try: Callable[[Try], None],
        base: Changes = NO_CHANGES,
    ):
        self.base = base
        self.config, self._compile_with, self._on_try = config, compile_with, on_try
        self._num_devices, self._can_offload = num_devices, can_offload
        self._deadline = time.monotonic() + seconds
        self.tries: dict[Changes, Try] = {}
        """In the order of trying."""
        self.is_complete = True
        """False: the time ran out before all was tried that might fit, or be a smaller change."""

    @property
    def closest(self) -> Try | None:
        """The try that needs the least memory; None: nothing could be compiled."""
        needed = [
            (tried.profile.fit.needed, tried) for tried in self.tries.values() if tried.profile and tried.profile.fit
        ]
        return min(needed, key=lambda each: each[0], default=(0, None))[1]

    def attempt(self, changes: Changes) -> Try:
        """Compiles with changes.

        Raises:
          OutOfTime: the time is up.
        """
        if changes not in self.tries:
            if time.monotonic() >= self._deadline:
                self.is_complete = False
                raise OutOfTime
            try:
                tried = Try(changes, self._compile_with(changes))
            except (UserMistake, TrainingFailed) as error:
                tried = Try(changes, None, str(error))
            self.tries[changes] = tried
            self._on_try(tried)
        return self.tries[changes]

    def least_harmful(self, base: Changes) -> Try | None:
        """The base with the smallest change of one more field with which the step fits; None: no such change does.

        Raises:
          OutOfTime: the time ran out before one was found.
        """
        remedies = single_remedies(base.apply(self.config), self._num_devices, can_offload=self._can_offload)
        for field, values in remedies.items():
            least, *others = (base.also(field, value) for value in values)
            if (tried := self.attempt(least)).fits:
                return tried
            if not others or not (found := self.attempt(others[-1])).fits:
                continue
            # Not by bisection: libtpu refuses within seconds what doesn't fit, but takes far longer to compile what
            # does.
            with contextlib.suppress(OutOfTime):
                return next((tried for each in others if (tried := self.attempt(each)).fits), found)
            return found
        return None


def search_remedy(search: Search) -> Try | None:
    """The smallest change of one field that makes the step fit; None: none was found."""
    try:
        return search.least_harmful(search.base)
    except OutOfTime:
        return None


def single_remedies(config: TrainConfig, num_devices: int, *, can_offload: bool = True) -> dict[str, list[Any]]:
    """Every remedy worth trying: the fields in the order of harm, each with its values from the least to the greatest.

    Args:
      config: the experiment whose step doesn't fit.
      num_devices: devices that there are.
      can_offload: whether the host has memory that isn't the devices' own.
    """
    fields: dict[str, Iterable[Any]] = {
        "model.remat": _stricter(config.model.remat, can_offload),
        "loss.chunk_size": _halvings(_tokens_at_once(config)),
        "optimizer.offload_moments": [True] if can_offload and not config.optimizer.offload_moments else [],
        "gradient_accumulation": range(config.gradient_accumulation + 1, config.batch_size + 1),
        **{f"mesh.{axis}": _larger(config, axis, num_devices) for axis in ("fsdp", "context", "tensor")},
    }
    valid = {field: [value for value in values if _is_valid(field, value, config)] for field, values in fields.items()}
    return {field: values for field, values in valid.items() if values}


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


def _is_valid(field: str, value: Any, config: TrainConfig) -> bool:
    try:
        Changes(((field, value),)).apply(config)
    except ValueError:
        return False
    return True
