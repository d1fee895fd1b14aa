"""What the two passes for dK and dV share: a block of keys and values stays, and query tiles stream past it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.backward_passes import Context, launch_pass
from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.tile_scheduler import TileScheduler
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall


class QueryTile(NamedTuple):
    """A step's tile of queries: head, number in that head, and rank among the block's tiles of that head."""

    head: Any
    number: Any
    rank: Any


def launch_key_value_pass(
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    machine: Hopper,
    operands: tuple[Any, ...],
    smem: Any,
    barriers: Any,
    *,
    producer: Callable[[Any], None],
    consumers: Sequence[Callable[[Any], None]],
    shift: int | None = None,
) -> tuple[Any, Any]:
    """Runs a pass and returns dK and dV. See `launch_pass`."""
    key, value = operands[1:3]
    batch, kv_len, num_kv_heads, _ = key.shape
    num_blocks = pl.cdiv(kv_len, tuning.block_kv)
    return launch_pass(
        call,
        tuning,
        machine,
        TileScheduler(batch, num_kv_heads, num_blocks, tuning.heads_at_once, last_blocks_first=False),
        operands,
        smem,
        barriers,
        producer=producer,
        consumers=consumers,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)),
        block_length=tuning.block_kv,
        heads_per_block=call.group_size,
        shift=shift,
    )


def load_keys_and_values(context: Context, first) -> None:
    """Copies the block's keys and values, from the key of index `first` on."""
    gmem, smem, barriers, block = context.gmem, context.smem, context.barriers, context.block
    keys = pl.ds(first, context.tuning.block_kv)
    plgpu.copy_gmem_to_smem(gmem.key.at[block.batch, keys, block.head], smem.k, barriers.k)
    plgpu.copy_gmem_to_smem(gmem.value.at[block.batch, keys, block.head], smem.v, barriers.v)


def query_tile(context: Context, step) -> QueryTile:
    """The query tile of a step: all tiles of one of the group's heads, then the next head's.

    So programs that run at the same time read the same head, and share its tiles in the L2 cache.
    """
    group_size, walk = context.call.group_size, context.walk
    member = jax.lax.div(step, walk.num_tiles)
    rank = step - member * walk.num_tiles
    return QueryTile(context.block.head * group_size + member, walk.tile(rank), rank)


def store_gradient(context: Context, gradient, smem, ref, first) -> None:
    """Starts to write the gradient of the keys or values from `first` on, through shared memory that held them."""
    smem[...] = gradient.astype(context.call.dtype)
    plgpu.commit_smem()
    keys = pl.ds(first, gradient.shape[0])
    plgpu.copy_smem_to_gmem(smem, ref.at[context.block.batch, keys, context.block.head])


def wait_for_consumers(context: Context) -> None:
    """Waits until no consumer reads the block's keys and values any more."""
    plgpu.barrier_arrive(context.barriers.done)
    plgpu.barrier_wait(context.barriers.done)
