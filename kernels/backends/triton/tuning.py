"""How the Triton kernels run: tuning objects, the best tiles known for a call, and the faster backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from kernels.call import AttentionCall

_HOPPER = 9.0
_WGMMA_ROWS = 64
# Of one program, by compute capability (CUDA C++ Programming Guide, technical specifications).
_SHARED_MEMORY_KIB = {8.0: 163, 8.6: 99, 8.7: 163, 8.9: 99, 9.0: 227, 10.0: 227, 12.0: 99}


@dataclass(frozen=True)
class TritonTiles:
    """The tiles of one of the `triton` backend's kernels.

    Attributes:
      block_q, block_kv: sides of a tile, in tokens.
      num_warps: warps that share a tile.
      num_stages: tiles in flight: the one being computed, and those being loaded.

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


@dataclass(frozen=True)
class TritonDecodeTuning:
    """How the `triton` backend decodes.

    Attributes:
      tiles: query rows and slots of a tile (`block_kv` divides the cache's block_size), warps and stages; None for the
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
        if self.num_programs < 1:
            raise ValueError(f"num_programs={self.num_programs} must be at least 1")


def resolve(tuning: TritonTuning | None, call: AttentionCall) -> TritonTuning:
    """Fills what a tuning leaves open. The split backward is the faster one: see docs/hopper_kernels.md."""
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
    """Tiles of the forward, of the kernel for dK and dV, and of that for dQ. docs/hopper_kernels.md says how chosen.

    Above a head dim of 128 tiles have few keys, since dK and dV must fit into registers.
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
    return TritonTiles(128, 64, 8, 2), TritonTiles(64, 32, 4, 2), TritonTiles(128, 32, 8, 3)


def _other_tiles(call: AttentionCall) -> tuple[TritonTiles, TritonTiles, TritonTiles]:
    """The same for GPUs on which nothing was measured: tiles that fit into the shared memory of each."""
    widest = max(call.head_dim, call.value_dim)
    if widest <= 64:
        return TritonTiles(128, 64, 4, 2), TritonTiles(64, 64, 4, 2), TritonTiles(64, 64, 4, 2)
    if widest <= 128:
        return TritonTiles(64, 64, 4, 2), TritonTiles(32, 128, 8, 2), TritonTiles(128, 32, 8, 2)
    return TritonTiles(64, 32, 4, 2), TritonTiles(16, 64, 8, 1), TritonTiles(32, 32, 4, 1)


def least_shared_memory(call: AttentionCall, tuning: TritonTuning) -> dict[str, int]:
    """Bytes of shared memory that each kernel whose tiles a tuning gives takes at least, by field.

    A Hopper GPU's matmuls of 64 rows and more read both operands from shared memory: the block that stays, and
    `num_stages` tiles of the other side. Other matmuls have one tile fewer there, and possibly no block.
    """
    query_bytes, value_bytes = (call.dtype.itemsize * padded_head_dim(dim) for dim in (call.head_dim, call.value_dim))
    least = {}
    for name in ("forward", "key_value", "query"):
        tiles: TritonTiles | None = getattr(tuning, name)
        if tiles is None:
            continue
        block, streamed = tiles.block_q, tiles.block_kv
        if name == "key_value":
            block, streamed = streamed, block
        tile_bytes = streamed * (query_bytes + value_bytes)
        if call.target.compute_capability == _HOPPER and block >= _WGMMA_ROWS:
            block_bytes = query_bytes if name == "forward" else query_bytes + value_bytes
            least[name] = block * block_bytes + tiles.num_stages * tile_bytes
        else:
            least[name] = (tiles.num_stages - 1) * tile_bytes
    return least


def shared_memory_excess(call: AttentionCall, tuning: TritonTuning) -> str | None:
    """Why the tiles that a tuning gives surely don't fit into shared memory, or None if they may; `resolve`'s do."""
    capability = call.target.compute_capability
    assert capability is not None, "refused by unsupported_reason"
    available = _SHARED_MEMORY_KIB.get(capability, max(_SHARED_MEMORY_KIB.values())) * 1024
    for name, least in least_shared_memory(call, tuning).items():
        if least > available:
            return (
                f"{name}={getattr(tuning, name)} at head dim {max(call.head_dim, call.value_dim)} needs at least "
                f"{least:,} bytes of shared memory, of which a GPU of compute capability {capability} has "
                f"{available:,}; lower num_stages, block_q or block_kv"
            )
    return None


def padded_head_dim(head_dim: int) -> int:
    """The head dim that the kernels work at: a power of two, at least 16."""
    return max(16, next_power_of_2(head_dim))


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
