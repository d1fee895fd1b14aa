"""The bandwidth with which the device copies memory. A decoding step's traffic is compared with it."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def copy_bandwidths(gigabytes: float, num_rounds: int) -> dict[str, float]:
    """Bytes read and written per second when an array is copied, the median of some rounds.

    Args:
      gigabytes: size of the array.
      num_rounds: copies that are timed.

    Returns:
      A figure for JAX, and one for PyTorch if it is installed and there is a GPU, where XLA's copy isn't the fastest.
    """
    size = int(gigabytes * 1e9) // 4
    array, copy = jnp.ones(size, jnp.float32), jax.jit(jnp.copy)
    seconds = {"jax": _median_seconds(lambda: jax.block_until_ready(copy(array)), num_rounds)}
    if jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None:
        import torch

        source = torch.ones(size, device="cuda")
        target = torch.empty_like(source)

        def copy_by_torch():
            target.copy_(source)
            torch.cuda.synchronize()

        seconds["torch"] = _median_seconds(copy_by_torch, num_rounds)
        del source, target
        torch.cuda.empty_cache()
    return {name: 2 * 4 * size / s for name, s in seconds.items()}


def _median_seconds(run: Callable[[], object], num_rounds: int) -> float:
    run()
    seconds = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
