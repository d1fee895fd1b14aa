"""The device that a call is compiled for, as backends choose and tune by it."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Target:
    """The kind of a device, attached or not.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      device_kind: the vendor's name, such as "NVIDIA H200", "TPU v5" (which is v5p) or "cpu".
      compute_capability: of an NVIDIA GPU, such as 9.0; None for other devices.
      num_multiprocessors: of a GPU; None for other devices.
    """

    platform: str
    device_kind: str
    compute_capability: float | None = None
    num_multiprocessors: int | None = None

    @staticmethod
    def of(device: jax.Device | None = None) -> Target:
        """The target of a device.

        Args:
          device: any device, those of an ahead-of-time topology included; None: the one JAX uses by default.
        """
        if device is None:
            default = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform's name or None
            device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        capability = getattr(device, "compute_capability", None)
        return Target(
            device.platform,
            device.device_kind,
            None if capability is None else float(capability),
            device.core_count if device.platform == "gpu" else None,
        )
