"""Checks that the backends that a model's config names serve the texts that somebody asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels import CantServe
from kernels.backends import Task
from layers.generator import Generator, SampleRequest
from layers.token_choice import TokenChoice
from trainer.errors import UserMistake


def check_backends(
    generator: Generator, requests: Sequence[SampleRequest], choice: TokenChoice, settings: Mapping[Task, str]
) -> None:
    """Raises UserMistake where they don't, with the setting to change; needs no parameters.

    Args:
      generator: of the model.
      requests: the texts.
      choice: how tokens are chosen.
      settings: what a user calls the choice of a backend for prompts ("attention") and for new tokens ("decoding").
    """
    try:
        generator.check(requests, choice)
    except CantServe as refused:
        raise UserMistake(
            f"{settings[refused.task]}={refused.implementation!r} can't serve this call: {refused.reason}; "
            "choose another, or None for the fastest that can"
        ) from refused
