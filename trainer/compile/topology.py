"""TPUs that aren't there: names of their topologies, their memory, and how libtpu is told to compile for one.

A topology's name is libtpu's: the generation and the shape of the slice in chips, such as v5p:2x2x1.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from trainer.config.suggestions import did_you_mean
from trainer.errors import UserMistake

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """One generation of TPUs."""

    name: str
    """In the names of topologies."""
    accelerator: str
    """In the names of accelerator types."""
    cores_per_chip: int
    """As accelerator types count them: v5p-8 has 4 chips, and so has v6e-4."""
    device_kind: str
    """What JAX calls one device."""
    num_dims: int
    """Of a slice's shape."""
    examples: tuple[str, ...]
    """Names of topologies."""
    memory_gib: float
    """HBM of one JAX device, as documented."""
    usable_gib: float
    """The part that libtpu leaves for a program, as libtpu 0.0.42 and 0.0.48 say when they refuse one."""
    options: tuple[tuple[str, str], ...] = ()
    """Options with which libtpu's devices are those that JAX has on the real machine."""


# memory_gib: docs.cloud.google.com/tpu/docs/v4, …/v5e, …/v5p, …/v6e and …/tpu7x, "HBM capacity". A v4 or v5p chip is
# one device of two cores; a tpu7x chip, of 192 GiB, is two devices.
GENERATIONS = (
    Generation("v4", "v4", 2, "TPU v4", 3, ("v4:2x2x1", "v4:4x4x4"), 32, 30.75, (("chip_config_name", "megacore"),)),
    Generation("v5e", "v5litepod", 1, "TPU v5 lite", 2, ("v5e:1x1", "v5e:2x2", "v5e:16x16"), 16, 15.75),
    Generation("v5p", "v5p", 2, "TPU v5", 3, ("v5p:2x2x1", "v5p:4x4x4"), 95, 95.74),
    Generation("v6e", "v6e", 1, "TPU v6 lite", 2, ("v6e:1x1", "v6e:2x2", "v6e:16x16"), 32, 31.25),
    Generation("tpu7x", "tpu7x", 2, "TPU7x", 3, ("tpu7x:2x2x1",), 96, 94.75),
)
_CHIPS_PER_HOST = 4


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips that need not exist.

    >>> Topology.parse("v5p:2x2x1").accelerator_type
    'v5p-8'
    """

    name: str
    generation: Generation
    shape: tuple[int, ...]
    """In chips."""

    @staticmethod
    def parse(name: str) -> Topology:
        """Reads a name.

        Raises:
          UserMistake: there is no such generation, or slices of it have another number of dims.
        """
        generation = next((known for known in GENERATIONS if name.startswith(f"{known.name}:")), None)
        shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", name.partition(":")[2])
        if generation is None or shape is None:
            examples = [example for known in GENERATIONS for example in known.examples]
            raise UserMistake(
                f"unknown topology {name!r}; expected a TPU generation and the shape of a slice in chips, such as "
                f"{', '.join(examples)}{did_you_mean(name, examples)}"
            )
        sizes = tuple(map(int, shape[0].split("x")))
        if len(sizes) != generation.num_dims:
            raise UserMistake(
                f"topology {name!r}: a slice of {generation.name} has {generation.num_dims} dims, got {len(sizes)}; "
                f"for example {', '.join(generation.examples)}"
            )
        return Topology(name, generation, sizes)

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def accelerator_type(self) -> str:
        return f"{self.generation.accelerator}-{self.num_chips * self.generation.cores_per_chip}"

    def environment(self) -> dict[str, str]:
        """The environment that a process needs before it loads libtpu, which would otherwise look for the TPU."""
        return {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": self.accelerator_type,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock is for programs that run
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        }

    def devices(self) -> list[Any]:
        """Its devices. Programs can be compiled for them, but not run, in a process with `environment()`.

        Raises:
          UserMistake: libtpu knows no slice of this shape.
        """
        import jax
        from jax.experimental import topologies

        options: dict[str, Any] = dict(self.generation.options)
        if self.num_chips < _CHIPS_PER_HOST:  # libtpu assumes hosts of 2x2x1 by default
            options["chips_per_host_bounds"] = (*self.shape, 1, 1)[:3]
        try:
            topology = topologies.get_topology_desc(topology_name=self.name, platform="tpu", **options)
        except jax.errors.JaxRuntimeError as error:
            raise UserMistake(
                f"topology {self.name!r}: libtpu knows none of this shape ({str(error).partition(': ')[2]}); "
                f"for example {', '.join(self.generation.examples)}"
            ) from error
        # Sorted, since libtpu compiles a program of n devices for the first n.
        return sorted(topology.devices, key=lambda device: device.id)


def require_libtpu() -> None:
    """Checks, without loading it, that libtpu is installed.

    Raises:
      UserMistake: it isn't; says how to install it.
    """
    if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise UserMistake(
            "--topology needs libtpu, the TPU's compiler, which isn't installed; install the tpu extra from the "
            'clone with: pip install -e ".[tpu]" (no TPU is needed)'
        )
