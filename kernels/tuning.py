"""How a backend runs, apart from what it computes: frozen tuning objects, each of which names its backend.

Give one as `implementation=` in place of the backend's name to replace the defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

_TPU_LANES = 128


@dataclass(frozen=True)
class BlockwiseTuning:
    """Sides of a tile of the `blockwise` backend, in tokens."""

    backend: ClassVar[str] = "blockwise"

    block_q: int
    block_kv: int

    def __post_init__(self):
        if self.block_q < 1 or self.block_kv < 1:
            raise ValueError(f"block_q={self.block_q} and block_kv={self.block_kv} must be at least 1")


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
      ValueError: a block that isn't a multiple of 128, or a compute block that doesn't divide its block.

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


class _Warpgroups:
    """Warpgroups of a `mosaic_gpu` kernel: some compute, one more loads, and gives them most of its registers."""

    num_warpgroups: int

    def _check_warpgroups(self) -> None:
        if self.num_warpgroups not in (1, 2, 3):
            raise ValueError(f"num_warpgroups={self.num_warpgroups} must be 1, 2 or 3")

    @property
    def compute_registers(self) -> int:
        """Registers of a computing thread, of the multiprocessor's 65,536."""
        return {1: 240, 2: 240, 3: 160}[self.num_warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers of a loading thread."""
        return {1: 40, 2: 24, 3: 32}[self.num_warpgroups]


@dataclass(frozen=True)
class MosaicForwardTuning(_Warpgroups):
    """How the `mosaic_gpu` forward kernel runs.

    Attributes:
      num_warpgroups: warpgroups that compute, each on 64 query rows; one more loads. Three have registers for tiles of
        64 keys; with larger ones they spill, to several times the time.
      block_kv: keys in a tile: 64, 128, 192 or 256.
      num_stages: key/value tiles in shared memory.
      take_turns: whether warpgroups issue their matmuls by turns.
      persistent: whether as many programs as the GPU has multiprocessors take one block after another, whichever is
        next when they are done with one, and load its first tiles while the one before ends: for short rows; for head
        dims up to 128. Else each block has a program of its own.
      heads_at_once: key/value heads, of all elements of the batch, whose queries' blocks are made before any other's:
        so few that many blocks read the same keys and values at a time, from the L2 cache.

    Raises:
      ValueError: a value out of range.
    """

    num_warpgroups: int = 2
    block_kv: int = 128
    num_stages: int = 2
    take_turns: bool = True
    persistent: bool = False
    heads_at_once: int = 24

    def __post_init__(self):
        self._check_warpgroups()
        if self.block_kv not in (64, 128, 192, 256):
            raise ValueError(f"block_kv={self.block_kv} must be 64, 128, 192 or 256")
        _require_positive(num_stages=self.num_stages, heads_at_once=self.heads_at_once)

    @property
    def block_q(self) -> int:
        """Query rows of a block."""
        return 64 * self.num_warpgroups


@dataclass(frozen=True)
class MosaicBackwardTuning(_Warpgroups):
    """How the `mosaic_gpu` backward kernels cut their work up.

    Attributes:
      num_warpgroups: warpgroups that compute; one more loads. The pass for dK and dV (and dQ, if fused) gives each
        64 keys, the pass for dQ alone 64 query rows.
      block_q: query rows in a tile of the pass for dK and dV, 64 or 128.
      num_stages: such tiles in shared memory.
      one_gradient_each: two warpgroups share 64 keys, and one makes dV, the other dK: above a head dim of 128 one
        warpgroup's registers don't hold both. Not for a fused backward.
      block_kv_dq, num_stages_dq: keys in a tile of the pass for dQ alone, and such tiles in shared memory (with
        one_gradient_each, of values one fewer).
      heads_at_once: key/value heads, of all elements of the batch, whose blocks are made before any other's: so few
        that many blocks of each run at a time, and read its queries, and add to their dQ, in the L2 cache.

    Raises:
      ValueError: a value out of range.
    """

    num_warpgroups: int = 2
    block_q: int = 64
    num_stages: int = 2
    one_gradient_each: bool = False
    block_kv_dq: int = 64
    num_stages_dq: int = 2
    heads_at_once: int = 24

    def __post_init__(self):
        self._check_warpgroups()
        if self.one_gradient_each and (self.num_warpgroups != 2 or self.num_stages < 2):
            raise ValueError(
                "one_gradient_each takes num_warpgroups=2 and num_stages of at least 2, not "
                f"{self.num_warpgroups} and {self.num_stages}"
            )
        for name in ("block_q", "block_kv_dq"):
            if getattr(self, name) not in (64, 128):
                raise ValueError(f"{name}={getattr(self, name)} must be 64 or 128")
        _require_positive(
            num_stages=self.num_stages, num_stages_dq=self.num_stages_dq, heads_at_once=self.heads_at_once
        )

    @property
    def block_kv(self) -> int:
        """Keys of a block of the pass for dK and dV."""
        return 64 if self.one_gradient_each else 64 * self.num_warpgroups

    @property
    def divides_dq_by_columns(self) -> bool:
        """Whether the warpgroups of a fused backward share a tile of dQ by columns: it has too few rows."""
        return self.block_q < 64 * self.num_warpgroups

    @property
    def block_q_dq(self) -> int:
        """Query rows of a block of the pass for dQ alone."""
        return 64 * self.num_warpgroups


@dataclass(frozen=True)
class MosaicGpuTuning:
    """How the `mosaic_gpu` backend runs.

    Attributes:
      backward: "fused": one kernel for all gradients, which adds up dQ in an order that differs from run to run; for
        head dims up to 128. "split": one for dK and dV, one for dQ; the same bits in every run. None: the faster one.
      forward_tiles, backward_tiles: how the kernels cut the work up; None for the best known for the call.
      interpret: run in Pallas's interpreter, on any device (JAX 0.11 and later; not "fused"): for tests, thousands of
        times slower. On a machine with few cores set the environment's PJRT_NPROC=16, or it may wait forever.

    Raises:
      ValueError: an unknown backward, "fused" to be interpreted, or tiles that only "split" takes.
    """

    backend: ClassVar[str] = "mosaic_gpu"

    backward: Literal["fused", "split"] | None = None
    forward_tiles: MosaicForwardTuning | None = None
    backward_tiles: MosaicBackwardTuning | None = None
    interpret: bool = False

    def __post_init__(self):
        if self.backward not in ("fused", "split", None):
            raise ValueError(f"backward={self.backward!r} must be 'fused', 'split' or None")
        if self.interpret and self.backward == "fused":
            raise ValueError("Pallas's interpreter can't add to memory as backward='fused' does; use backward='split'")
        tiles = self.backward_tiles
        if tiles is not None and self.backward == "fused" and tiles.one_gradient_each:
            raise ValueError("backward='fused' can't take backward_tiles with one_gradient_each; use backward='split'")
        may_fuse = self.backward != "split" and not self.interpret
        if tiles is not None and may_fuse and not tiles.one_gradient_each:
            # Its warpgroups share a tile of dQ by 64 rows, or two of them by columns.
            shared = (tiles.num_warpgroups, tiles.block_q)
            if shared not in ((1, 64), (2, 64), (2, 128)):
                raise ValueError(
                    "backward_tiles of a fused backward are (num_warpgroups, block_q) = (1, 64), (2, 64) or (2, 128), "
                    f"not {shared}; choose one of these, or backward='split'"
                )


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
        _require_positive(num_stages=self.num_stages)


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


@dataclass(frozen=True)
class TritonDecodeTuning:
    """How the `triton` backend decodes.

    Attributes:
      tiles: query rows and cells of a tile (`block_kv` divides the cache's block_size), warps and stages; None for the
        best known for the call.
      num_programs: most programs that a call's blocks are split over; at least one runs for each sequence and head.
      interpret: run in Triton's interpreter, on any device, float16 only: for tests, thousands of times slower.

    Raises:
      ValueError: no program.
    """

    backend: ClassVar[str] = "triton"

    tiles: TritonTiles | None = None
    num_programs: int = 528
    interpret: bool = False

    def __post_init__(self):
        _require_positive(num_programs=self.num_programs)


Tuning = BlockwiseTuning | SplashTuning | MosaicGpuTuning | TritonTuning | TritonDecodeTuning


def _require_positive(**settings: int) -> None:
    for name, setting in settings.items():
        if setting < 1:
            raise ValueError(f"{name}={setting} must be at least 1")
