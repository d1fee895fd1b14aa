"""Tells what XLA compiles, by the name of the jitted function."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def count_compilations() -> Iterator[Counter[str]]:
    """Counts what is compiled inside by any thread, by the name of the jitted function. Cache hits count."""
    counts: Counter[str] = Counter()

    def listen(event: str, _: float, **metadata: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[metadata["fun_name"].removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
