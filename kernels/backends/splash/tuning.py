"""Tiles of the splash kernel, the default ones of each TPU generation, and the chip's limits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kernels.backends.splash.launch import Pass
from kernels.backends.splash.tile_grid import plan_grid, whole
from kernels.call import AttentionCall
from kernels.masks.bounds import OF_KEYS

_TPU_LANES = 128


@dataclass(frozen=True)
class SplashTuning:
    """Tiles of the `splash` backend's three passes, in tokens: multiples of 128, the width of a TPU's vector register.

    Attributes:
      block_q, block_kv: the forward's tile.
      block_kv_compute: part of `block_kv` that one matmul takes.
      block_q_dkv, block_kv_dkv, block_kv_dkv_compute: the same of the dK/dV pass, or of the fused backward.
      block_q_dq, block_kv_dq: the dQ pass's tile; unused by the fused backward.
      backward: "split": one pass for dK and dV, one for dQ. "fused": one pass for all three, which computes the weights
        once, but writes a partial dQ for every key/value tile, kv_len / block_kv_dkv times dQ's own memory.
      interpret: run in Pallas's interpreter, on any device: for tests and for reading, thousands of times slower.

    Raises:
      ValueError: a block that isn't a multiple of 128, a compute block that doesn't divide its block, or another
        `backward`.

    >>> SplashTuning.square(512).block_kv_dkv_compute
    512
    """

    backend: ClassVar[str] = "splash"

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    block_q_dq: int
    block_kv_dq: int
    backward: Literal["split", "fused"] = "split"
    interpret: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.name.startswith("block_") and (size < 1 or size % _TPU_LANES):
                raise ValueError(
                    f"{field.name}={size} is not a positive multiple of {_TPU_LANES}; "
                    f"use {max(1, -(-size // _TPU_LANES)) * _TPU_LANES}"
                )
        for name in ("block_kv", "block_kv_dkv"):
            block, compute = getattr(self, name), getattr(self, f"{name}_compute")
            if block % compute:
                raise ValueError(f"{name}_compute={compute} doesn't divide {name}={block}; use a divisor of it")
        if self.backward not in ("split", "fused"):
            raise ValueError(f"backward={self.backward!r} must be 'split' or 'fused'")

    @staticmethod
    def square(block: int, *, backward: Literal["split", "fused"] = "split", interpret: bool = False) -> SplashTuning:
        """Tiles of `block × block` in every pass."""
        return SplashTuning(*(block,) * 8, backward=backward, interpret=interpret)


# By `jax.Device.device_kind`. All compile for head dims up to 256, forward and both backwards; none has been timed by
# this project, which has no TPU. The v6e's matrix unit has twice the side of the others'.
DEFAULTS = {
    "TPU v4": SplashTuning.square(512),
    "TPU v5 lite": SplashTuning.square(512),  # v5e
    "TPU v5": SplashTuning.square(512),  # v5p
    "TPU v6 lite": SplashTuning.square(1024),  # v6e
}
OTHERS = SplashTuning.square(512)
LARGEST = SplashTuning.square(1024)
"""Of the tunings that a call gets which names none. Where its grid doesn't fit, no smaller tiles' does."""

# Scalar memory of a core, 1 MiB on all of the above, less what the kernel keeps there besides the tile grid.
_GRID_BYTES = (1 << 20) - (64 << 10)


def resolve(tuning: SplashTuning | None, call: AttentionCall) -> SplashTuning:
    """The tiles of a call that names none: larger ones where the sequence is so long that the grid wouldn't fit."""
    if tuning is not None:
        return tuning
    tuning = DEFAULTS.get(call.target.device_kind, OTHERS)
    return tuning if grid_excess(call, tuning) is None else LARGEST


def _fitted(
    call: AttentionCall, block_q: int, block_kv: int, compute: int, *, transposed: bool = False, shrunk: bool = True
) -> Pass:
    """A pass with blocks no larger than the sequences need."""
    block_q, block_kv = min(block_q, whole(call.q_len, 128)), min(block_kv, whole(call.kv_len, 128))
    # The kernel reads the positions and bounds of whole tiles of keys.
    whole_tiles = call.has_key_value_positions or not set(OF_KEYS).isdisjoint(call.bounds)
    compute = block_kv if whole_tiles else math.gcd(block_kv, compute)
    return Pass(block_q, block_kv, compute, transposed, shrunk)


def forward_pass(call: AttentionCall, tuning: SplashTuning) -> Pass:
    """The pass that makes the output and the lse."""
    return _fitted(call, tuning.block_q, tuning.block_kv, tuning.block_kv_compute)


def backward_dkv_pass(call: AttentionCall, tuning: SplashTuning) -> Pass:
    """The pass that makes dK and dV, and dQ too if fused."""
    blocks = (tuning.block_q_dkv, tuning.block_kv_dkv, tuning.block_kv_dkv_compute)
    return _fitted(call, *blocks, transposed=True, shrunk=tuning.backward == "split")


def backward_dq_pass(call: AttentionCall, tuning: SplashTuning) -> Pass:
    """The pass that makes dQ alone."""
    return _fitted(call, tuning.block_q_dq, tuning.block_kv_dq, tuning.block_kv_dq)


def grid_excess(call: AttentionCall, tuning: SplashTuning) -> str | None:
    """Why the tile grids don't fit into scalar memory, or None if they do."""
    passes = [forward_pass(call, tuning), backward_dkv_pass(call, tuning)]
    if tuning.backward == "split":
        passes.append(backward_dq_pass(call, tuning))
    largest, walk = max(((_grid_bytes(call, walk), walk) for walk in passes), key=lambda each: each[0])
    if largest <= _GRID_BYTES:
        return None
    return (
        f"its grid of {walk.block_q}×{walk.block_kv} tiles takes {largest:,} bytes of scalar memory, which has room "
        f"for {_GRID_BYTES:,}; use larger tiles (kernels.SplashTuning), or split the sequence over more devices"
    )


def _grid_bytes(call: AttentionCall, walk: Pass) -> int:
    grid = plan_grid(call, walk)
    return grid.num_bytes + (4 * grid.tiles.size if call.mask.needs_lookup else 0)
