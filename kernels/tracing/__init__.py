"""What kernels need of JAX while it traces them: device, number types, mesh axes, and calls that XLA leaves alone."""
