"""How the Triton kernels run: tuning objects, the best tiles known for a call, and the faster backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from kernels.call import AttentionCall

_HOPPER = 9.0


@dataclass(frozen=True)
class TritonTiles:
    """How one of the `triton` backend's kernels cuts its work up.

    Attributes:
      block_q, block_kv: sides of a tile, in tokens.
      num_warps: warps that share a tile.
      num_stages: tiles being loaded while one is computed, and that one.

    Raises:
      ValueError: a block or a number of warps that isn't a power of two, or no stage.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        for name, smallest in (("block_q", 16), ("block_kv", 16), ("num_warps", 1)):
            size = getattr(self, name)
            if size < smallest or size & (size - 1):
                raise ValueError(f"{name}={size} must be a power of two, at least {smallest}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages={self.num_stages} must be at least 1")


@dataclass(frozen=True)
class TritonTuning:
    """How the `triton` backend runs.

    Attributes:
      backward: "split": one kernel for dK and dV, one for dQ; the same bits in every run. "fused": one kernel for all
        gradients, which adds up dQ in an order that differs from run to run. None: the faster one.
      forward, key_value, query: tiles of the forward, of the kernel for dK and dV (and dQ, if fused), and of that for
        dQ alone; None for the best known for the call.
      interpret: run in Triton's interpreter, on any device, float16 only: for tests, thousands of times slower.

    Raises:
      ValueError: an unknown backward.
    """

    backend: ClassVar[str] = "triton"

    backward: Literal["fused", "split"] | None = None
    forward: TritonTiles | None = None
    key_value: TritonTiles | None = None
    query: TritonTiles | None = None
    interpret: bool = False

    def __post_init__(self):
        if self.backward not in ("fused", "split", None):
            raise ValueError(f"backward={self.backward!r} must be 'fused', 'split' or None")


def resolve(tuning: TritonTuning | None, call: AttentionCall) -> TritonTuning:
    """Settles what a tuning leaves open.

    Split is the default for every head dim: what the fused backward saves in matmuls, two of seven, it loses in adding
    dQ up in memory, and at 32, where both take as long, in clearing and rounding dQ. `python -m
    experiments.benchmarks.attention --suite triton` times both forms.
    """
    tuning = tuning or TritonTuning()
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
    # Few keys, or the sums of dK and dV wouldn't fit into the registers.
    return TritonTiles(128, 64, 8, 2), TritonTiles(64, 32, 4, 2), TritonTiles(128, 32, 8, 3)


def _other_tiles(call: AttentionCall) -> tuple[TritonTiles, TritonTiles, TritonTiles]:
    """The same for GPUs that nothing was measured on.

    Compiled for compute capability 8.0, 8.6, 8.9, 10.0 and 12.0, both backwards fit into each one's shared memory (at
    most 89 KB but on 10.0), and calls with whole tiles spill no more than 8 bytes of a thread's registers.
    """
    widest = max(call.head_dim, call.value_dim)
    if widest <= 64:
        return TritonTiles(128, 64, 4, 2), TritonTiles(64, 64, 4, 2), TritonTiles(64, 64, 4, 2)
    if widest <= 128:
        return TritonTiles(64, 64, 4, 2), TritonTiles(32, 128, 8, 2), TritonTiles(128, 32, 8, 2)
    return TritonTiles(64, 32, 4, 2), TritonTiles(16, 64, 8, 1), TritonTiles(32, 32, 4, 1)
