"""Changes of a config when a run resumes: which are refused, and how the others are printed and kept.

Each field of `TrainConfig` declares the consequence of a change (`trainer/config/options.py`). A change that makes
sense is allowed: later steps follow the new config, and the change is recorded with the step after which it was made.
A change that makes none (another model, another tokenizer) is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.config.file import config_from_json, config_to_json, flag_types
from trainer.config.options import Change, change_of
from trainer.config.train_config import TrainConfig
from trainer.errors import UserMistake, shorten

CHANGE_OF_FIELD: dict[str, Change] = {
    name: change for name in flag_types() if (change := change_of(TrainConfig, name)) is not None
}
"""The declared consequence of a change, by `section.field`. A test checks that every field has one."""
_REFUSED: dict[Change, str] = {
    "model": "the parameters are of another model",
    "optimizer": "the moments are of another optimizer",
    "tokenizer": "the parameters were trained on other tokens",
    "seed": "the parameters and the order of the data are made from it already; samples.seed may change",
    "beginning": "the parameters began as those of that folder, which a run that resumes doesn't load again",
}
# Fields that a new run may set on top of another's parameters; see trainer/config/init_from.py.
_ON_TOP_OF_PARAMETERS = ("model.masks", "model.layer_overrides", "model.rope_base", "model.rope_scaling.")


@dataclass(frozen=True)
class ConfigChange:
    """One field that changed when a run resumed."""

    step: int
    """Steps done before the change: it holds from the next step on."""
    field: str
    """`section.field`."""
    before: Any
    """As a JSON value."""
    after: Any
    """As a JSON value."""

    @property
    def consequence(self) -> Change:
        """The declared consequence; "free" for a field that has since been renamed."""
        return CHANGE_OF_FIELD.get(self.field, "free")

    def __str__(self) -> str:
        before, after = shorten(repr(self.before), 200), shorten(repr(self.after), 200)
        return f"{self.field}: {before} up to step {self.step}, {after} from now on"


@dataclass(frozen=True)
class ConfigHistory:
    """The config of a run's next steps, and its changes so far. Each checkpoint holds one."""

    config: TrainConfig
    changes: tuple[ConfigChange, ...] = ()
    """The oldest first."""

    def resumed(self, step: int, config: TrainConfig) -> ConfigHistory:
        """The history after a run has resumed with a config.

        Args:
          step: the steps behind the run.
          config: of the steps to come.
        """
        return ConfigHistory(config, self.changes + tuple(_changes(step, self.config, config)))

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON's types."""
        return {"config": config_to_json(self.config), "changes": changes_to_json(self.changes)}

    @staticmethod
    def from_json(value: Any) -> ConfigHistory:
        """Reads back what `to_json` made.

        Raises:
          UserMistake: it is something else.
        """
        if not isinstance(value, dict) or not isinstance(value.get("changes"), list):
            raise UserMistake("expected an object with config and changes")
        names = {"step", "field", "before", "after"}
        for change in value["changes"]:
            if not isinstance(change, dict) or change.keys() != names or not isinstance(change["field"], str):
                raise UserMistake(f"expected changes with {', '.join(sorted(names))}, got {str(change)[:80]}")
        changes = tuple(ConfigChange(**change) for change in value["changes"])
        return ConfigHistory(config_from_json(value.get("config")), changes)


def changes_to_json(changes: Iterable[ConfigChange]) -> list[dict[str, Any]]:
    """As the record holds them."""
    return [{"step": item.step, "field": item.field, "before": item.before, "after": item.after} for item in changes]


def refuse_other_run(held: TrainConfig, config: TrainConfig, place: str) -> None:
    """Refuses a config that can't go on from another's checkpoints.

    Args:
      held: the config that they were made with.
      config: of the steps to come.
      place: what holds that config, for the message: "workdir runs/x", say.

    Raises:
      UserMistake: names each field and why it can't change.
    """
    refused = [change for change in _changes(0, held, config) if change.consequence in _REFUSED]
    if refused:
        lines = [
            f"{item.field}: {shorten(str(item.before), 200)} in {place}, {shorten(str(item.after), 200)} now"
            for item in refused
        ]
        reasons = dict.fromkeys(_REFUSED[item.consequence] for item in refused)
        raise UserMistake(
            "\n  ".join([f"{place} is of another config:", *lines])
            + f"\n{'; '.join(reasons)}; choose another with --workdir"
            + (
                ", which --init-from lets begin with this one's parameters"
                if all(item.field.startswith(_ON_TOP_OF_PARAMETERS) for item in refused)
                else ""
            )
        )


def refuse_other_phases(held: TrainConfig, config: TrainConfig, step: int) -> None:
    """Refuses other phases up to a checkpoint. Later ones may change, and so may the end of the one under way.

    Args:
      held: the config that the checkpoint was made with.
      config: of the steps to come.
      step: the steps behind the checkpoint.

    Raises:
      UserMistake: names the first phase that differs.
    """
    if not config.phases and not held.phases:
        return
    phases, made = config.in_phases(), [phase for phase in held.in_phases() if phase.first_step < step]
    if len(phases) < len(made):
        raise UserMistake(
            f"the config has {len(phases)} phases, and the checkpoint of step {step} is of phases[{len(made) - 1}]; "
            "keep the phases that have begun, or choose another --workdir"
        )
    for ours, theirs in zip(phases, made, strict=False):
        refuse_other_run(theirs.config, ours.config, f"phases[{theirs.index}] of the checkpoint")
        is_over = theirs.last_step < step
        if (ours.first_step, ours.moments) != (theirs.first_step, theirs.moments) or (
            is_over and ours.last_step != theirs.last_step
        ):
            raise UserMistake(
                f"phases[{ours.index}] takes steps {ours.first_step + 1} to {ours.last_step}, and those of the "
                f"checkpoint, {theirs.first_step + 1} to {theirs.last_step}, are made already; give it the same "
                "place, or choose another --workdir"
            )
        if not is_over and ours.last_step < step and ours is not phases[-1]:
            raise UserMistake(
                f"phases[{ours.index}] ends after step {ours.last_step}, and the checkpoint of step {step} is of this "
                "phase; let it end there or later, or choose another --workdir"
            )


def field_values(config: TrainConfig) -> dict[str, Any]:
    """Each field of a config, as `section.field` → its JSON value."""
    return {name: config_to_json(functools.reduce(getattr, name.split("."), config)) for name in flag_types()}


def evaluation_settings(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide how a validation loss is measured on given sequences, with their JSON values.

    Only fields that may change when a run resumes. The fields of the model matter too, but may not change.
    """
    return {name: value for name, value in field_values(config).items() if CHANGE_OF_FIELD[name] == "evaluation"}


def _changes(step: int, before: TrainConfig, after: TrainConfig) -> list[ConfigChange]:
    new = field_values(after)
    return [ConfigChange(step, name, old, new[name]) for name, old in field_values(before).items() if old != new[name]]
