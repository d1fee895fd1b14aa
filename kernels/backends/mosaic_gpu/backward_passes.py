"""What the backward passes share.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.launch import launch
from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.memory import padded_head_dim, spread
from kernels.backends.mosaic_gpu.tile_mask import TokenArrays
from kernels.backends.mosaic_gpu.tile_scheduler import TileScheduler, WorkBlock
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.plan import Row, Rows

_LOG2_E = math.log2(math.e)
LSE, DELTA = 0, 1
"""Indices of a query's two numbers in shared memory, `lse_delta`."""

SmemT = TypeVar("SmemT")
BarriersT = TypeVar("BarriersT")


class BackwardArrays(NamedTuple):
    """What the passes read and write, padded to whole tiles and whole head dims; within a kernel, references to it.

    Attributes:
      lse: float32 `[B, N, T]` in units of log₂, and huge where a row attends to nothing.
      delta: float32 `[B, N, T]`: rowsum(dO∘O), less the gradient of lse.
      offsets: columns that stand for lse and delta (`offsets`); None where a pass reads these.
      rows: the tiles of each block.
      d_query: an output, or the reference that a fused pass adds to.
    """

    query: Any
    key: Any
    value: Any
    d_output: Any
    lse: Any
    delta: Any
    offsets: Any
    rows: Rows
    tokens: TokenArrays
    d_query: Any = None
    d_key: Any = None
    d_value: Any = None


class BackwardContext(NamedTuple, Generic[SmemT, BarriersT]):
    """What every role of a pass knows: the call and how it runs, and one program's block, memory and barriers.

    Attributes:
      block, first: the block that stays in shared memory, and the index of its first query or key.
      walk: the tiles that stream past it.
      num_steps: tiles of all heads that stream past it.
    """

    call: AttentionCall
    tuning: MosaicBackwardTuning
    machine: Hopper
    gmem: BackwardArrays
    smem: SmemT
    barriers: BarriersT
    block: WorkBlock
    first: jax.Array
    walk: Row
    num_steps: jax.Array
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
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    machine: Hopper,
    scheduler: TileScheduler,
    operands: tuple[Any, ...],
    scratch: tuple[SmemT, BarriersT],
    *,
    producer: Callable[[BackwardContext[SmemT, BarriersT]], None],
    consumers: Sequence[Callable[[BackwardContext[SmemT, BarriersT]], None]],
    out_type: Any,
    block_length: int,
    heads_per_block: int,
    shift: int | None = None,
) -> Any:
    """Runs a pass and returns its outputs. See `launch`.

    Args:
      operands, out_type: the first fields of `BackwardArrays`, and the others.
      block_length: queries or keys of a block.
      heads_per_block: heads whose tiles stream past a block.
      shift: by how many tiles a block starts later than the one before it; None where the mask staggers them.
    """

    def make_context(gmem_refs, smem, barriers, program):
        gmem, block = BackwardArrays(*gmem_refs), scheduler.block(program)
        warpgroup = jax.lax.axis_index("warpgroup")
        walk = gmem.rows.read(block.batch, block.number, None if shift is None else block.number * shift)
        first, num_steps = block.number * block_length, heads_per_block * walk.num_tiles
        return BackwardContext(call, tuning, machine, gmem, smem, barriers, block, first, walk, num_steps, warpgroup)

    return launch(
        make_context,
        producer,
        consumers,
        operands,
        out_type=out_type,
        scratch=scratch,
        num_programs=scheduler.num_programs,
        tuning=tuning,
        machine=machine,
    )


def launch_key_value_pass(
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    machine: Hopper,
    operands: tuple[Any, ...],
    scratch: tuple[SmemT, BarriersT],
    **roles_and_shift: Any,
) -> tuple[Any, Any]:
    """Runs a pass over blocks of keys, and returns dK and dV. See `launch_pass`."""
    key, value = operands[1:3]
    batch, kv_len, num_kv_heads, _ = key.shape
    num_blocks = pl.cdiv(kv_len, tuning.block_kv)
    return launch_pass(
        call,
        tuning,
        machine,
        TileScheduler(batch, num_kv_heads, num_blocks, tuning.num_l2_heads, last_blocks_first=False),
        operands,
        scratch,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)),
        block_length=tuning.block_kv,
        heads_per_block=call.group_size,
        **roles_and_shift,
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
    group_size, walk = context.call.group_size, context.walk
    member = jax.lax.div(step, walk.num_tiles)
    rank = step - member * walk.num_tiles
    return QueryTile(context.block.head * group_size + member, walk.tile(rank), rank)


def store_gradient(context: BackwardContext, gradient, smem, ref, first) -> None:
    """Starts to write the gradient of the keys or values from `first` on, through shared memory that held them."""
    smem[...] = gradient.astype(context.call.dtype)
    plgpu.commit_smem()
    keys = pl.ds(first, gradient.shape[0])
    plgpu.copy_smem_to_gmem(smem, ref.at[context.block.batch, keys, context.block.head])


def wait_for_consumers(context: BackwardContext) -> None:
    """Waits until no consumer reads the block's keys and values any more."""
    plgpu.barrier_arrive(context.barriers.done)
    plgpu.barrier_wait(context.barriers.done)


def log2_scale(call: AttentionCall) -> float:
    """What brings logits (with a soft cap: tanh of the capped logits) to units of log₂."""
    return _LOG2_E * (call.scale if call.logits_soft_cap is None else call.logits_soft_cap)


def probabilities(logits, lse, call: AttentionCall, keep_allowed: Callable[[jax.Array], jax.Array], *, rows: bool):
    """Probabilities of a tile, and the soft cap's derivative at its logits (None without a cap).

    Args:
      lse: of the rows or columns, in units of log₂; None if it was subtracted from the logits before.
      keep_allowed: sets the logits of pairs that may not attend to −inf.
    """
    cap, slope = call.logits_soft_cap, None
    if cap is not None:
        logits = jnp.tanh(logits * (call.scale / cap))
        slope = 1 - logits * logits
    exponent = keep_allowed(logits) * log2_scale(call)
    return jnp.exp2(exponent if lse is None else exponent - spread(lse, logits.shape, rows=rows)), slope
