"""As what family of transformers a run's model goes out."""

from __future__ import annotations

from typing import NamedTuple

from layers import GPTConfig
from layers.pretrained.save import family_of


class ChosenFamily(NamedTuple):
    """A family that can express a model."""

    model_type: str
    left: str
    """Why it isn't the family that the run began with; empty: it is, or the run began with none."""


def choose_family(model: GPTConfig, began_as: str | None) -> ChosenFamily:
    """The family that a run's parameters began as, if it can still express the model; otherwise the first that can.

    Args:
      model: the run's.
      began_as: transformers' name of the family; None: the parameters were random.

    Raises:
      ValueError: no family can express the model.
    """
    if began_as is None:
        return ChosenFamily(family_of(model)[0].model_type, "")
    try:
        return ChosenFamily(family_of(model, began_as)[0].model_type, "")
    except ValueError as refused:
        chosen = family_of(model)[0].model_type
        return ChosenFamily(chosen, f"the run began with a {began_as}, and goes out as a {chosen}: {refused}")


def describe_export(model: GPTConfig, began_as: str | None) -> str:
    """The same in a few words, for the opening lines."""
    try:
        return f"as a {choose_family(model, began_as).model_type}"
    except ValueError as refused:
        _, nearest, *_ = str(refused).splitlines()
        return f"as no family of transformers: the nearest, {nearest.strip()}"
