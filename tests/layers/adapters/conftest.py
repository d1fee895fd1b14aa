"""What tests inside other packages' models share."""

import jax
import pytest


@pytest.fixture
def needs_eight_devices():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
