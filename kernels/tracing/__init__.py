"""The parts of JAX that tracing depends on: device, number types, mesh axes, and calls that XLA leaves alone."""
