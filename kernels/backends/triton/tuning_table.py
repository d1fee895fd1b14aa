"""The best tiles known for each kind of call, and the faster backward."""

from __future__ import annotations

import dataclasses

from kernels.call import AttentionCall
from kernels.tuning import TritonTiles, TritonTuning

_HOPPER = 9.0


def fill_in(tuning: TritonTuning, call: AttentionCall) -> TritonTuning:
    """Settles what a tuning leaves open.

    Split is the faster backward for every head dim. What the fused one saves in matmuls, two of seven, it loses in
    adding dQ up in memory: at 1×2×32768 causal the kernel for dK and dV takes 1.14 ms at head dim 64 and 1.86 ms at
    128, that for dQ 0.63 and 1.28 ms, the fused one 2.09 and 3.55 ms (H200, 2026-11-21).
    """
    forward, key_value, query = (_hopper_tiles if call.target.compute_capability == _HOPPER else _other_tiles)(call)
    return dataclasses.replace(
        tuning,
        backward=tuning.backward or "split",
        forward=tuning.forward or forward,
        key_value=tuning.key_value or key_value,
        query=tuning.query or query,
    )


def _hopper_tiles(call: AttentionCall) -> tuple[TritonTiles, TritonTiles, TritonTiles]:
    """Tiles of the forward, of the kernel for dK and dV, and of that for dQ.

    The best of five to ten for each, causal, at 1×2×32768 and, for 64 and 128, 4×24×4096 on an H200 (2026-11-21).
    """
    widest, is_long = max(call.head_dim, call.value_dim), call.q_len > 8192
    if widest <= 32:
        forward = TritonTiles(128, 128, 4, 3) if is_long else TritonTiles(64, 64, 4, 3)
        return forward, TritonTiles(64, 128, 4, 3), TritonTiles(64, 64, 4, 3)
    if widest <= 64:
        tall = TritonTiles(128 if is_long else 64, 64, 4, 3)
        return tall, TritonTiles(64, 64, 4, 3), tall
    if widest <= 128:
        return TritonTiles(64, 64, 4, 3), TritonTiles(64, 128, 8, 3), TritonTiles(128, 64, 8, 3)
    # Whose registers hold half of the other shapes' dK and dV.
    return TritonTiles(128, 64, 8, 2), TritonTiles(64, 32, 4, 2), TritonTiles(128, 32, 8, 3)


def _other_tiles(call: AttentionCall) -> tuple[TritonTiles, TritonTiles, TritonTiles]:
    """The same for GPUs that nothing was measured on.

    Both backwards compile for 8.0, 8.6, 8.9, 10.0 and 12.0 within the 99 KB of shared memory that the smallest of
    them have, and but for a few bytes without spilling registers.
    """
    widest = max(call.head_dim, call.value_dim)
    if widest <= 64:
        return TritonTiles(128, 64, 4, 2), TritonTiles(64, 64, 4, 2), TritonTiles(64, 64, 4, 2)
    if widest <= 128:
        return TritonTiles(64, 64, 4, 2), TritonTiles(32, 128, 8, 2), TritonTiles(128, 32, 8, 2)
    return TritonTiles(64, 32, 4, 2), TritonTiles(16, 64, 8, 1), TritonTiles(32, 32, 4, 1)
