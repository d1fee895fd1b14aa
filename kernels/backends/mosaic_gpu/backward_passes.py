"""What the backward passes share.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.machine import Hopper, launch
from kernels.backends.mosaic_gpu.memory import padded_head_dim, spread
from kernels.backends.mosaic_gpu.softmax import log2_scale
from kernels.backends.mosaic_gpu.tile_mask import TileMask, TokenArrays
from kernels.backends.mosaic_gpu.tile_scheduler import TileScheduler, WorkBlock
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.plan import Row, Rows

LSE, DELTA = 0, 1
"""Indices of a query's two numbers in shared memory, `lse_delta`."""

SmemT = TypeVar("SmemT")
BarriersT = TypeVar("BarriersT")


class BackwardArrays(NamedTuple):
    """What the passes read and write, padded to whole tiles and whole head dims; within a kernel, references to it."""

    query: Any
    key: Any
    value: Any
    d_output: Any
    lse: Any  # float32 `[B, N, T]` in units of log₂, and huge where a row attends to nothing
    delta: Any  # float32 `[B, N, T]`: rowsum(dO∘O), less the gradient of lse
    offsets: Any  # columns that stand for lse and delta (`offset_columns`); None where a pass reads these
    rows: Rows  # the tiles of each block
    tokens: TokenArrays
    d_query: Any = None  # an output, or the reference that a fused pass adds to
    d_key: Any = None
    d_value: Any = None


class BackwardContext(NamedTuple, Generic[SmemT, BarriersT]):
    """What every role of a pass knows: the call and how it runs, and one program's block, memory and barriers."""

    call: AttentionCall
    tuning: MosaicBackwardTuning
    machine: Hopper
    gmem: BackwardArrays
    smem: SmemT
    barriers: BarriersT
    block: WorkBlock  # the block that stays in shared memory
    first: jax.Array  # index of the block's first query or key
    tiles: Row  # the tiles that the block visits, of one head
    num_steps: jax.Array  # number of tiles of all heads
    warpgroup: jax.Array


class QueryTile(NamedTuple):
    """A step's tile of queries: head, number in that head, and rank among the block's tiles of that head."""

    head: Any
    number: Any
    rank: Any


def padded_head_dims(call: AttentionCall, tuning: MosaicBackwardTuning) -> tuple[int, int]:
    """The head dims that the passes work at, of queries and keys, and of values: multiples of 64."""
    # The halves of a fused dQ are 64 wide, too.
    head_dim, value_dim = (max(64, padded_head_dim(dim)) for dim in (call.head_dim, call.value_dim))
    return (head_dim, value_dim) if tuning.one_gradient_per_warpgroup else (max(head_dim, value_dim),) * 2


def launch_pass(
    arrays: BackwardArrays,
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    machine: Hopper,
    scratch: tuple[SmemT, BarriersT],
    producer: Callable[[BackwardContext[SmemT, BarriersT]], None],
    consumers: Sequence[Callable[[BackwardContext[SmemT, BarriersT]], None]],
    *,
    transposed: bool,
    shift: int | None = None,
) -> list[Any]:
    """Runs a pass over blocks of keys (`transposed`) and returns dK and dV, or over blocks of queries for dQ alone.

    Args:
      shift: by how many tiles a block starts later than the one before it; None where the mask staggers them.
    """
    if transposed:
        operands, outputs, block_length = arrays[:10], (arrays.key, arrays.value), tuning.block_kv
        heads_per_block, num_l2_heads = call.group_size, tuning.num_l2_heads
    else:
        operands, outputs, block_length = arrays[:9], (arrays.query,), tuning.block_q_dq
        heads_per_block, num_l2_heads = 1, tuning.num_l2_heads * call.group_size
    batch, length, num_heads, _ = outputs[0].shape
    num_blocks = pl.cdiv(length, block_length)
    scheduler = TileScheduler(batch, num_heads, num_blocks, num_l2_heads, last_blocks_first=not transposed)

    def make_context(gmem_refs, smem, barriers, program):
        gmem, block = BackwardArrays(*gmem_refs), scheduler.block(program)
        warpgroup = jax.lax.axis_index("warpgroup")
        tiles = gmem.rows.read(block.batch, block.number, None if shift is None else block.number * shift)
        first, num_steps = block.number * block_length, heads_per_block * tiles.num_tiles
        return BackwardContext(call, tuning, machine, gmem, smem, barriers, block, first, tiles, num_steps, warpgroup)

    return launch(
        make_context,
        producer,
        consumers,
        operands,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        scratch=scratch,
        num_programs=scheduler.num_programs,
        tuning=tuning,
        machine=machine,
    )


def load_keys_and_values(context: BackwardContext, first) -> None:
    """Copies the block's keys and values, from the key of index `first` on."""
    gmem, smem, barriers, block = context.gmem, context.smem, context.barriers, context.block
    keys = pl.ds(first, context.tuning.block_kv)
    plgpu.copy_gmem_to_smem(gmem.key.at[block.batch, keys, block.head], smem.k, barriers.k)
    plgpu.copy_gmem_to_smem(gmem.value.at[block.batch, keys, block.head], smem.v, barriers.v)


def query_tile(context: BackwardContext, step) -> QueryTile:
    """The query tile of a step: all tiles of one of the group's heads, then the next head's.

    So programs that run at the same time read the same head, and share its tiles in the L2 cache.
    """
    tiles = context.tiles
    member = jax.lax.div(step, tiles.num_tiles)
    rank = step - member * tiles.num_tiles
    return QueryTile(context.block.head * context.call.group_size + member, tiles.tile(rank), rank)


def store_gradient(context: BackwardContext, gradient, smem, ref, first) -> None:
    """Starts to write a gradient of a block's queries, keys or values from `first` on, through shared memory."""
    smem[...] = gradient.astype(context.call.dtype)
    plgpu.commit_smem()
    rows = pl.ds(first, gradient.shape[0])
    plgpu.copy_smem_to_gmem(smem, ref.at[context.block.batch, rows, context.block.head])


def wait_for_consumers(context: BackwardContext) -> None:
    """Waits until no consumer reads the block's keys and values any more."""
    plgpu.barrier_arrive(context.barriers.done)
    plgpu.barrier_wait(context.barriers.done)


def probabilities(logits, lse, mask: TileMask, is_partial, column_first, slot):
    """Probabilities of a tile, and the soft cap's derivative at its logits (None without a cap). See `TileMask.apply`.

    Args:
      lse: of the queries, in units of log₂; None if it was subtracted from the logits before.
    """
    call, slope = mask.context.call, None
    if call.logits_soft_cap is not None:
        logits = jnp.tanh(logits * (call.scale / call.logits_soft_cap))
        slope = 1 - logits * logits
    exponent = mask.apply(logits, is_partial, column_first, slot) * log2_scale(call)
    if lse is not None:
        exponent = exponent - spread(lse, logits.shape, rows=mask.streamed == "key_value")
    return jnp.exp2(exponent), slope
