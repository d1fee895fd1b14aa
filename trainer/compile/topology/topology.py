"""The questions that every topology answers, whoever made its devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.hardware import Platform

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a program may take on each device."""

    size: int
    """Bytes."""
    source: str
    """How the size is known, in words."""


@dataclass(frozen=True)
class Topology(ABC):
    """Devices that need not exist, by the name that the command line takes."""

    platform: ClassVar[Platform]
    """As JAX calls it."""
    name: str

    @abstractmethod
    def require_compiler(self) -> None:
        """Checks, without loading it, that the compiler for these devices is installed.

        Raises:
          UserMistake: it isn't; says how to install it.
        """

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The environment that a process needs before it loads the compiler."""

    @abstractmethod
    def devices(self) -> list[Any]:
        """The devices. Programs can be compiled for them, but not run, in a process with `environment()`.

        Raises:
          UserMistake: the compiler knows no such topology.
        """
