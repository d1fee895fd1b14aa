"""Hosts of NVIDIA GPUs that aren't there, which XLA compiles for by a description of the GPU.

A topology's name is the GPU and how many there are: h100:8 is one host with 8, h200:4x8 four hosts with 8 each.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.compile.topology.topology import GIB, DeviceMemory, Topology
from trainer.errors import UserMistake
from trainer.hardware import Platform

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_MOST_GPUS_PER_HOST = 8
_DEFAULT_SHARE = 0.75  # docs.jax.dev/en/latest/gpu_memory_allocation.html
_SHARE_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


@dataclass(frozen=True)
class GpuModel:
    """One model of NVIDIA's Hopper GPUs, as SXM module."""

    name: str
    """In the names of topologies."""
    device_kind: str
    """JAX's name of one device."""
    memory_gib: float
    """The total that CUDA reports (`cudaMemGetInfo`): a little less than the data sheet's 80 and 141 GB hold."""
    bandwidth_tb_s: float
    """Of that memory, by the data sheet."""

    @property
    def examples(self) -> tuple[str, ...]:
        """Names of topologies."""
        return f"{self.name}:8", f"{self.name}:4x8"

    def memory(self) -> DeviceMemory:
        """The share of the memory that JAX would take in this environment."""
        variable = next((name for name in _SHARE_VARIABLES if os.environ.get(name)), None)
        share, why = (
            (_DEFAULT_SHARE, f"JAX's default share; {_SHARE_VARIABLES[0]} sets another")
            if variable is None
            else (_read_share(variable), f"the share that {variable} sets")
        )
        return DeviceMemory(round(share * self.memory_gib * GIB), f"{share:g} of {self.memory_gib:g} GiB, {why}")

    def target_config(self) -> str:
        """The GPU as XLA's compiler wants it described: a `GpuTargetConfigProto` in text form.

        Sources: the CUDA programming guide's table of compute capability 9.0, and the data sheets of the H100 and H200
        SXM. XLA has descriptions of its own (xla/backends/gpu/target_config/specs), but takes them by no name.
        """
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.device_kind}"
            runtime_version {{ major: 13 }}
            dnn_version_info {{ major: 9 minor: 12 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
              core_count: 132
              fpus_per_core: 128
              clock_rate_ghz: 1.98
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              shared_memory_per_block: {48 * 2**10}
              shared_memory_per_block_optin: {227 * 2**10}
              shared_memory_per_core: {228 * 2**10}
              l2_cache_size: {50 * 2**20}
              memory_bandwidth: {round(self.bandwidth_tb_s * 1e12)}
              device_memory_size: {round(self.memory_gib * GIB)}
              device_interconnect_info {{ active_links: 18 }}
            }}
        """


GPU_MODELS = (
    GpuModel("h100", "NVIDIA H100 80GB HBM3", 79.1, 3.35),
    GpuModel("h200", "NVIDIA H200", 139.8, 4.8),
)


@dataclass(frozen=True)
class GpuHosts(Topology):
    """Hosts that have the same number of GPUs each.

    >>> hosts = GpuHosts.parse("h200:4x8")
    >>> hosts.model.device_kind, hosts.num_hosts, hosts.gpus_per_host
    ('NVIDIA H200', 4, 8)
    """

    platform: ClassVar[Platform] = "gpu"
    model: GpuModel
    num_hosts: int
    gpus_per_host: int

    @staticmethod
    def parse(name: str) -> GpuHosts | None:
        """Reads a name; None if it is none of an NVIDIA GPU.

        Raises:
          UserMistake: there are more GPUs than a host has.
        """
        model = next((known for known in GPU_MODELS if name.startswith(f"{known.name}:")), None)
        shape = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", name.partition(":")[2])
        if model is None or shape is None:
            return None
        num_hosts, gpus_per_host = int(shape[1] or 1), int(shape[2])
        if gpus_per_host > _MOST_GPUS_PER_HOST:
            hosts = -(-num_hosts * gpus_per_host // _MOST_GPUS_PER_HOST)
            raise UserMistake(
                f"topology {name!r}: a host has at most {_MOST_GPUS_PER_HOST} GPUs, got {gpus_per_host}; name the "
                f"hosts and the GPUs on each: {model.name}:{hosts}x{_MOST_GPUS_PER_HOST}"
            )
        return GpuHosts(name, model, num_hosts, gpus_per_host)

    def require_compiler(self) -> None:
        if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
            raise UserMistake(
                f"--topology {self.name} needs JAX's plugin for NVIDIA GPUs, the compiler, which isn't installed; "
                f"{_install_plugin()}"
            )

    def environment(self) -> dict[str, str]:
        # The plugin compiles without being the platform that JAX starts, which would look for a driver.
        return {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}

    def devices(self) -> list[Any]:
        import jax
        from jax.experimental import topologies

        try:
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name=self.name,
                target_config=self.model.target_config(),
                # Partitions × hosts × GPUs: a host is a partition, and a "slice", where no NVLink goes beyond it.
                topology=f"{self.num_hosts}x1x{self.gpus_per_host}",
            )
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UserMistake(
                f"topology {self.name!r}: JAX {jax.__version__} can't compile for NVIDIA GPUs that aren't there "
                f"({reason}); {_install_plugin()}, use another JAX, or leave --topology out on a machine with the GPUs"
            ) from error
        return list(topology.devices)


def _install_plugin() -> str:
    jaxlib = importlib.metadata.version("jaxlib")  # JAX ignores a plugin of another version, with a warning
    return f"install it with: pip install jax-cuda13-plugin=={jaxlib} nvidia-cuda-nvcc (no GPU is needed)"


def _read_share(variable: str) -> float:
    try:
        return float(os.environ[variable])
    except ValueError as error:
        raise UserMistake(
            f"{variable}={os.environ[variable]!r} is not a number; expected a share such as 0.9"
        ) from error
