"""Slices of TPUs that aren't there: their names, their memory, and how libtpu compiles for one.

A topology's name is libtpu's: the generation and the shape of the slice in chips, such as v5p:2x2x1.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.compile.topology.topology import GIB, DeviceMemory, Topology
from trainer.errors import UserMistake
from trainer.hardware import Platform


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
    """JAX's name of one device."""
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

    def memory(self) -> DeviceMemory:
        """The memory that libtpu lets a program take."""
        source = f"libtpu's limit for {self.name}, {self.memory_gib:g} GiB by its data sheet"
        return DeviceMemory(round(self.usable_gib * GIB), source)


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
class TpuSlice(Topology):
    """A slice of TPU chips.

    >>> TpuSlice.parse("v5p:2x2x1").accelerator_type
    'v5p-8'
    """

    platform: ClassVar[Platform] = "tpu"
    generation: Generation
    shape: tuple[int, ...]
    """In chips."""

    @staticmethod
    def parse(name: str) -> TpuSlice | None:
        """Reads a name; None if it is none of a TPU.

        Raises:
          UserMistake: slices of this generation have another number of dims.
        """
        generation = next((known for known in GENERATIONS if name.startswith(f"{known.name}:")), None)
        shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", name.partition(":")[2])
        if generation is None or shape is None:
            return None
        sizes = tuple(map(int, shape[0].split("x")))
        if len(sizes) != generation.num_dims:
            raise UserMistake(
                f"topology {name!r}: a slice of {generation.name} has {generation.num_dims} dims, got {len(sizes)}; "
                f"for example {', '.join(generation.examples)}"
            )
        return TpuSlice(name, generation, sizes)

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def accelerator_type(self) -> str:
        return f"{self.generation.accelerator}-{self.num_chips * self.generation.cores_per_chip}"

    def require_compiler(self) -> None:
        if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
            raise UserMistake(
                f"--topology {self.name} needs libtpu, the TPU's compiler, which isn't installed; install the tpu "
                'extra from the clone with: pip install -e ".[tpu]" (no TPU is needed)'
            )

    def environment(self) -> dict[str, str]:
        return {
            # Otherwise libtpu looks for the TPU.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": self.accelerator_type,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock is for programs that run
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        }

    def devices(self) -> list[Any]:
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
