"""Changes of a config's fields, and where a run with phases sets them: in the phase, or for the whole run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.config import Phase, TrainConfig

_FIELDS_OF_PHASES = frozenset(each.name for each in dataclasses.fields(Phase))


class PhaseSetting(NamedTuple):
    """A field of one of a run's phases, set to another value."""

    phase: int
    """From 0."""
    field: str
    """Of `Phase`; with a section before it: `optimizer.offload_moments`."""
    value: Any

    @property
    def name(self) -> str:
        return f"phases[{self.phase}].{self.field}"

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"


@dataclass(frozen=True)
class PhaseOfRun:
    """One of a run's phases, which changes are for."""

    run: TrainConfig
    """It has phases."""
    index: int
    """From 0."""

    def setting(self, field: str, value: Any) -> PhaseSetting | None:
        """The setting that gives the phase another value of a config field; None: a flag does, for the whole run."""
        section, _, name = field.rpartition(".")
        if name in _FIELDS_OF_PHASES:
            return PhaseSetting(self.index, name, value)
        if section in _FIELDS_OF_PHASES:  # the last phase that sets the section is the one to change
            for index in range(self.index, -1, -1):
                if getattr(self.run.phases[index], section) is not None:
                    return PhaseSetting(index, field, value)
        return None


@dataclass(frozen=True)
class Changes:
    """Fields of the config set to other values."""

    values: tuple[tuple[str, Any], ...] = ()
    phase: PhaseOfRun | None = dataclasses.field(default=None, compare=False, repr=False)
    """The phase that they are for; None: the run has no phases."""

    def also(self, field: str, value: Any) -> Changes:
        """These and another one, in the place of one of the same field."""
        others = (each for each in self.values if each[0] != field)
        return dataclasses.replace(self, values=(*others, (field, value)))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The changes of the whole run, as the command line takes them."""
        return tuple(
            text
            for field, value in self.values
            if self._phase_setting(field, value) is None
            for text in (f"--{field.replace('_', '-')}", str(value))
        )

    @property
    def phase_settings(self) -> tuple[PhaseSetting, ...]:
        """The changes of phases, which a config file sets."""
        settings = (self._phase_setting(field, value) for field, value in self.values)
        return tuple(setting for setting in settings if setting is not None)

    def _phase_setting(self, field: str, value: Any) -> PhaseSetting | None:
        return None if self.phase is None else self.phase.setting(field, value)

    def __str__(self) -> str:
        return " ".join((*self.arguments, *map(str, self.phase_settings)))

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The changed config.

        Args:
          config: without phases; for those of a phase, that of the phase.

        Raises:
          ValueError: it is none that can be run.
        """
        for field, value in self.values:
            config = _replace(config, field, value)
            config.check_model()  # which a config with init_from leaves to whoever puts its model in
        return config

    def check_run(self) -> None:
        """Checks that the whole run can be made with the changes, not only the phase.

        Raises:
          ValueError: it can't.
        """
        if self.phase is None:
            return
        phases = [*self.phase.run.phases]
        for setting in self.phase_settings:
            phases[setting.phase] = _replace(phases[setting.phase], setting.field, setting.value)
        run = dataclasses.replace(self.phase.run, phases=tuple(phases))
        for field, value in self.values:
            if self._phase_setting(field, value) is None:
                run = _replace(run, field, value)
        for phase in run.in_phases():
            phase.config.check_model()  # which a run with init_from leaves to whoever puts its model in


NO_CHANGES = Changes()


def _replace(config: Any, field: str, value: Any) -> Any:
    """A dataclass with a field replaced, which may be a section's."""
    section, _, name = field.rpartition(".")
    value = dataclasses.replace(getattr(config, section), **{name: value}) if section else value
    return dataclasses.replace(config, **{section or name: value})
